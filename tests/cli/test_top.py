"""`headway top`, on a real terminal too, and the line on standard error while a command waits."""

import asyncio
import io
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from headway.cli import terminal as module
from headway.cli.admin import Admin, AdminError
from headway.cli.status import Sort
from headway.cli.terminal import HELP, fit, narrowed, waiting
from headway.cli.top import BoardEvent, BoardFollower, BoardView, Keys, events, largest, milliseconds
from headway.model import InferenceRequest, RequestOptions
from headway.runtime.request_id import new_id
from tests.cli.command import code_of
from tests.cli.terminal import Terminal
from tests.cli.test_operate import TENANT, Running, service
from tests.cli.test_status import FLEET, Port, port

__all__ = ["port", "service"]

NOW = 1000.0
RECENT: dict[str, Any] = {
    "window": 10.0,
    "tiers": [
        {"tier": "paid", "answered": 20.0, "latency": [0.1, 0.19, 1.5]},
        {"tier": "free", "answered": 0.0, "latency": [None, None, None]},
    ],
    "latency": [0.1, 0.19, 1.5], "processes": {"edge-1": 11.5}, "refused": {"shed": 4.0}, "retries": {"crashed": 0.1},
    "failed": {"shed": 4.0, "internal": 0.5}, "ended": {"default": 24.5},
}  # fmt: skip
QUEUES = [{"model": "default", "version": "", "tier": "paid", "depth": 4, "oldest_seconds": 0.25}]
SNAPSHOT = {**FLEET, "now": NOW, "queues": QUEUES}


def taken(events: Sequence[BoardEvent], at: float, unicode: bool = True) -> BoardView:
    view = BoardView(unicode)
    for event in events:
        view.take(event, at)
    return view


def batch(worker: str, left: float, fill: float = 0.5, seconds: float = 1.0, outcome: str = "ok") -> list[Any]:
    return [worker, "default", "1", left, 8, fill, "headway", [0, 8], seconds, outcome]


BATCHES = [
    batch("host-b/gpu-0", 990.0, 1.0),
    batch("host-b/gpu-0", 993.0, 0.1),
    batch("host-a/gpu-0", 995.0, outcome="crashed"),
    batch("host-a/gpu-0", 998.5, seconds=0.0, outcome=""),
]


def start(**more: Any) -> BoardEvent:
    told = {
        "id": "edge-1", "role": "gateway", "version": "1.0", "tiers": ["paid", "free"], "promise_ms": 200.0, "now": NOW,
        "rows": [], "departures": BATCHES, "changes": [[997.0, "host-a/gpu-0", "default", "healthy", 2]],
        "snapshot": SNAPSHOT, "recent": RECENT, "away": "", "lost_at": 0.0,
    }  # fmt: skip
    return BoardEvent("start", told | more, "r-1")


def tick(**more: Any) -> BoardEvent:
    told = {"now": NOW + 1, "rows": [], "departures": [], "changes": [], "away": "", "lost_at": 0.0}
    return BoardEvent("tick", told | more, "r-2")


def text(*found: BoardEvent, width: int = 0, unicode: bool = True) -> str:
    return taken(found, 0.0, unicode).text(0.0, width)


def test_the_board_tells_what_the_dashboard_tells() -> None:
    shown = text(start()).splitlines()
    assert shown[:6] == [
        "asked         gateway edge-1, version 1.0",
        "requests      24.5/s, P95 190 ms of 200 ms promised",
        "waiting       4, oldest 250 ms",
        "workers       1 of 2 healthy",
        (
            "capacity      default: 700 of 1000 inputs/s (estimated), 1 healthy, 1 degraded, the broker's memory is scarce; "
            "other: not measured yet, 1 healthy, 12 s ago"
        ),
        "dead letters  2",
    ]
    assert [line.split() for line in shown[7:10]] == [
        ["LAST", "10", "S", "ANSWERED/S", "P50", "P95", "P99", "WAITING", "OLDEST"],
        ["paid", "20.0", "100", "ms", "190", "ms", "1.5", "s", "4", "250", "ms"],
        ["free", "0.0", "-", "-", "-", "0", "-"],
    ]
    assert "refused       shed 4.0/s" in shown
    assert "errors        internal 0.5/s" in shown, "a refusal is no error"
    assert "retried       crashed 0.1/s" in shown
    assert "departures    0.4/s of 8.0 inputs, 52% full: headway 100%" in shown
    [row] = [line.split() for line in shown if line.startswith("edge-1 ")]
    assert "11.5" in row, "rates of processes are of the same seconds"
    assert shown[-2:] == [
        "   3 s ago  host-a/gpu-0 is healthy, after 2 restarts", "   4 s ago  host-a/gpu-0: a batch of 8 came back crashed",
    ]  # fmt: skip


@pytest.mark.parametrize(("unicode", "marks"), [(True, "█▁▅"), (False, "%.+")])
def test_a_lane_shows_batches_by_fill_failures_and_changes(unicode: bool, marks: str) -> None:
    full, low, half = tuple(marks)
    lanes = [line for line in text(start(), unicode=unicode).splitlines() if line.endswith("|")]
    assert lanes == [
        # The lane covers 989 to 999 at 6 columns a second.
        "host-a/gpu-0 |" + " " * 36 + half * 6 + "x" + " " * 5 + "!" + " " * 8 + half * 3 + "|",
        "host-b/gpu-0 |" + " " * 6 + full * 6 + " " * 12 + low * 6 + " " * 30 + "|",
    ]


def test_the_board_fits_the_width_that_there_is() -> None:
    lanes = [line for line in text(start(), width=40).splitlines() if line.endswith("|")]
    assert [len(line) for line in lanes] == [40, 40]
    head = next(line for line in text(start(), width=40).splitlines() if line.startswith("LAST"))
    assert head == "LAST 10 S  ANSWERED/S  P95     WAITING"


def test_ticks_go_on_from_the_start() -> None:
    late = batch("host-a/gpu-0", 998.5, seconds=0.4)
    view = taken([tick(), start(), tick(departures=[late])], 5.0)
    assert "0.5/s of 8.0 inputs" not in view.text(5.0), "a batch that arrived is still that one"
    assert "nothing heard for 6 s" in view.text(11.0)
    view.take(BoardEvent("error", "no answer"), 12.0)
    assert "connection    no answer" in view.text(12.0)
    view.take(tick(), 13.0)
    assert "connection" not in view.text(13.0)
    view.take(start(departures=[], changes=[]), 14.0)
    assert "departures    0.0/s\n" in view.text(14.0)


def test_before_the_start_the_reason_is_all_there_is() -> None:
    assert BoardView().text(0.0) == "connecting …"
    assert text(BoardEvent("error", "no answer")) == "no answer"


def test_without_the_broker_the_board_is_as_it_was() -> None:
    shown = text(start(), tick(away="refused", snapshot=SNAPSHOT | {"age_seconds": 12.4}, recent=RECENT))
    assert "broker away   refused\nfleet         as it was 12 s ago\n" in shown
    nothing = text(start(away="refused", snapshot=None, recent=None, departures=[], changes=[]))
    assert nothing.splitlines()[1:3] == ["broker away   refused", "fleet         not known"]
    lost = text(start(lost_at=NOW - 30))
    assert "history       begins 30 s ago, when the broker lost its data" in lost


def test_the_workers_that_are_wanted_and_why_are_told() -> None:
    trouble = "gpu-1 does not start: no memory"
    scaling = {"desired": 4, "current": 2, "coming": 1, "late": 1, "trouble": trouble, "reason": "queue above 100"}
    shown = text(
        start(snapshot=SNAPSHOT | {"scaling": {"default": scaling}}, changes=[], departures=[],
              scalings=[[990.0, "default", 2, 4, "up", "queue above 100 for 60 s"]]),
    ).splitlines()  # fmt: skip
    assert "wanted        default: 4 workers, 2 there, 1 coming, 1 late; gpu-1 does not start: no memory" in shown
    assert shown[-1] == "  10 s ago  default: 2 to 4 workers, queue above 100 for 60 s"


def test_no_name_steers_the_terminal() -> None:
    evil = "\x1b[31mred"
    departures = [batch(evil, 995.0, outcome=evil)]
    shown = text(start(departures=departures, changes=[[997.0, evil, evil, evil, 0]], id=evil, away=evil),
                 tick(recent=RECENT | {"refused": {evil: 1.0}}))  # fmt: skip
    assert "\x1b" not in shown and "[31mred" in shown


def test_of_several_models_each_has_its_rate() -> None:
    assert "models        b 3.0/s, a 1.0/s" in text(start(recent=RECENT | {"ended": {"a": 1.0, "b": 3.0}}))
    assert (
        largest({"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 1.5, "f": 0.5}, "{:.0f}")
        == "a 5, b 4, c 3, d 2, others 2"
    )
    assert (milliseconds(None), milliseconds(0.0126), milliseconds(2.0)) == ("-", "13 ms", "2.0 s")


def test_a_text_is_cut_to_the_terminal_and_says_so() -> None:
    assert fit("a\nbcdef\nc\nd", 4, 3) == "a\nbcd…\n… 2 "
    assert fit("a\nb", 80, 2) == "a\nb"
    assert fit("a\nb\nc", 80, 2) == "a\n… 2 more lines: the terminal is too short"


def test_columns_that_are_needed_least_go_first() -> None:
    head, rows = ("A", "BB", "CCC"), [("1", "2", "3")]
    assert narrowed(head, rows, 0, ("CCC",)) == (head, rows)
    assert narrowed(head, rows, 10, ("CCC", "BB")) == (head, rows)
    assert narrowed(head, rows, 9, ("CCC", "BB")) == (("A", "BB"), [("1", "2")])
    assert narrowed(head, rows, 2, ("CCC", "BB")) == (("A",), [("1",)])


def test_keys_quit_help_and_sort() -> None:
    keys = Keys()
    assert not keys.press("q")
    assert keys.press("?") and keys.helps
    assert keys.press("?")
    assert not vars(keys)["helps"]
    assert keys.press("s") and keys.sort == Sort("STATUS")
    view = taken([start()], 0.0)
    assert _workers(view.text(0.0, 0, keys.sort)) == ["host-a/gpu-0", "host-b/gpu-0"]
    assert keys.press("r") and keys.sort == Sort("STATUS", reverse=True)
    assert _workers(view.text(0.0, 0, keys.sort)) == ["host-b/gpu-0", "host-a/gpu-0"]
    for _ in range(4):
        keys.press("s")
    assert keys.sort.column == "WORKER"


def _workers(shown: str) -> list[str]:
    return [line.split()[0] for line in shown.splitlines() if "/gpu-0" in line and "2026" in line]


STREAM = 'retry: 1000\n\nid: r-1\nevent: start\ndata: {"now":1}\n\nid: r-2\nevent: tick\ndata: {"now":2}\n\n'


def test_events_are_read_until_the_stream_ends(port: Port) -> None:
    port.answers["/internal/events"] = (200, STREAM)
    heard = events(Admin(port.url, ""))
    assert [next(heard), next(heard)] == [BoardEvent("start", {"now": 1}, "r-1"), BoardEvent("tick", {"now": 2}, "r-2")]
    with pytest.raises(AdminError, match="closed the stream"):
        next(heard)
    port.answers["/internal/events"] = (401, {"message": "no token"})
    with pytest.raises(AdminError, match=r"no token. Set HEADWAY_ADMIN_TOKEN to it \(401\)"):
        next(events(Admin(port.url, "")))


def test_a_stream_that_ended_is_opened_again_where_it_was(port: Port) -> None:
    class Over(BaseException):
        pass

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        port.answers["/internal/events"] = (503, {"message": "away"})
        if len(slept) == 2:
            raise Over

    port.answers["/internal/events"] = (200, STREAM)
    follower = BoardFollower(Admin(port.url, ""), sleep)
    with pytest.raises(Over):
        follower._follow()
    assert [(event.kind, event.id) for event in follower.heard()] == [
        ("start", "r-1"), ("tick", "r-2"), ("error", ""), ("error", ""),
    ]  # fmt: skip
    assert port.asked[-1].header["last-event-id"] == "r-2"


@pytest.mark.parametrize("command", [["top", "--once"], ["top"]])
def test_without_a_terminal_the_board_is_printed_once(
    command: Sequence[str], service: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of([*command]) == 0
    shown = capsys.readouterr().out
    assert "workers       1 of 1 healthy" in shown
    assert "gpu-0 |" in shown
    assert "\x1b" not in shown


def test_an_interval_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for interval in ("0", "nan"):
        assert code_of(["top", "--interval", interval]) == 2
        assert "--interval" in capsys.readouterr().err


@pytest.mark.processes
def test_on_a_terminal_the_board_of_one_process_is_live_until_q(service: Running) -> None:
    async def load() -> None:
        for number in range(30):
            request = InferenceRequest(TENANT, new_id(), RequestOptions(4.0, 1), "m", f"text {number}", b"")
            await service.stand.gateway.ask(request)
            await asyncio.sleep(0.05)

    with Terminal("top", "--interval", "0.1") as terminal:
        terminal.until("q quits", "workers       1 of 1 healthy")
        loading = asyncio.run_coroutine_threadsafe(load(), service.loop)
        terminal.until("gpu-0 |", "▂")
        terminal.until("requests      3.0/s")
        loading.result(60)
        terminal.press("?")
        terminal.until(HELP.splitlines()[1].strip())
        terminal.press("?")
        terminal.press("s")
        terminal.until("workers by status")
        terminal.press("q")
        assert terminal.code() == 0


@pytest.mark.processes
def test_on_a_terminal_a_missing_token_is_told_until_ctrl_c(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_ADMIN_TOKEN", "wrong")
    with Terminal("top") as terminal:
        terminal.until("HEADWAY_ADMIN_TOKEN", "(401)")
        terminal.interrupt()
        assert terminal.code() == 0


class Stream(io.StringIO):
    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self.live, self.lines = live, threading.Semaphore(0)

    def isatty(self) -> bool:
        return self.live

    def flush(self) -> None:
        self.lines.release()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT", 0.0)
    monkeypatch.setattr(module, "EVERY", 0.0)


def shown(monkeypatch: pytest.MonkeyPatch, *, live: bool) -> str:
    stream = Stream(live=live)
    monkeypatch.setattr("sys.stderr", stream)
    with waiting("simulating") as doing:
        stream.lines.acquire()
        doing.tell("simulating 9 GPUs")
        while "9 GPUs" not in stream.getvalue():
            stream.lines.acquire()
    return stream.getvalue()


@pytest.mark.usefixtures("soon")
def test_a_terminal_has_one_line_which_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, live=True)
    assert text.startswith("\r\x1b[Ksimulating … 0 s\r\x1b[K")
    assert "simulating 9 GPUs … 0 s" in text
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


@pytest.mark.usefixtures("soon")
def test_a_file_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, live=False).splitlines()
    assert lines[0] == "simulating … 0 s"
    assert "simulating 9 GPUs … 0 s" in lines


def test_what_is_quickly_done_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(live=True)
    monkeypatch.setattr("sys.stderr", stream)
    with waiting("simulating"):
        pass
    assert stream.getvalue() == ""
