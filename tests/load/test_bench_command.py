"""`headway bench`, and the search for the highest rate that LoadGen considers valid."""

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.stand import judge
from bench.stand.judge import Late, Load, Verdict
from headway.cli import main
from headway.load.report import Record, line
from tests.load.scripted import Call, Exchange, Scripted

Run = Callable[..., int]


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    scripted = Scripted(Call.answer, hangs_up=False)
    loop = asyncio.new_event_loop()
    scripted.listening = loop.run_until_complete(
        loop.create_server(lambda: Exchange(scripted), "127.0.0.1", 0, backlog=1024)
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield scripted, f"127.0.0.1:{scripted.listening.sockets[0].getsockname()[1]}"

    asyncio.run_coroutine_threadsafe(scripted.end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def bench(*arguments: str) -> int:
    """Run `headway bench` with a short load and these arguments, and return the exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--rate", "1000", "--duration", "0.05", *arguments])
    return int(ended.value.code or 0)


def test_bench_prints_a_table_and_exits_0(server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]) -> None:
    scripted, address = server
    code = bench(address, "--mix", "paid=1,free=1", "--expect", "upper", "--promise", "9999", "--seed", "4")
    out = capsys.readouterr().out
    assert code == 0
    assert "1,000 requests/s for 0.05 s, poisson arrivals" in out
    for part in ("paid", "free", "p99.9", "seed 4", "all right", "100.00% of the requests"):
        assert part in out
    assert len({call.input for call in scripted.calls}) == len(scripted.calls) > 20


def test_json_to_both_places(server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert bench(server[1], "--arrivals", "uniform", "--json", "--out", str(file)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(file.read_text())
    assert printed["total"]["outcomes"] == {"ok": 50}
    assert printed["mismatches"] is None


def test_body_model_and_key_reach_the_server_and_the_key_no_result(
    server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"input": "hello", "parameters": {"k": 1}}')
    arguments = [server[1], "--body", str(body), "--model", "m", "--key", "canary-1", "--json"]
    monkeypatch.setattr("sys.argv", ["headway", "bench", *arguments, "--key=canary-2"])
    assert bench(*arguments) == 0
    out = capsys.readouterr().out
    call = server[0].calls[0]
    assert (call.body["parameters"], call.body["model"]) == ({"k": 1}, "m")
    assert call.input.endswith(" hello")
    assert "authorization: bearer canary-1" in call.head
    assert "canary" not in out
    assert json.loads(out)["command"][-3:] == ["…", "--json", "--key=…"]


def test_bench_exits_1_when_answers_are_wrong_or_nothing_succeeded(
    server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server[0].script = lambda call: call.answer("wrong")
    assert bench(server[1], "--expect", "echo", "--json") == 1
    assert json.loads(capsys.readouterr().out)["mismatches"] > 20
    server[0].script = lambda call: call.answer(status=429, headers="Retry-After: 1\r\n", error="SHED")
    assert bench(server[1], "--arrivals", "uniform", "--quiet") == 1
    printed = capsys.readouterr()
    assert "all with Retry-After" in printed.out
    assert printed.err == "headway: none of 50 requests succeeded; 50 ended with: 429 SHED\n"


HINT = "Give a body .*: --body FILE"


@pytest.mark.parametrize(
    ("status", "members", "told"),
    [
        (422, {"error": "BAD_REQUEST", "message": "KeyError: 'text'"}, f"KeyError: 'text'. {HINT}"),
        (400, {"error": {"message": "no \x1bprompt."}}, f"no �prompt. {HINT}"),
        (400, {"error": "the input `x` is"}, f"the input `x` is. {HINT}"),
        (400, {"odd": 1}, f'{{"odd":1}}. {HINT}'),
        (401, {"error": "UNAUTHENTICATED", "message": "no key"}, "no key$"),
    ],
)
def test_bench_says_what_the_first_error_of_the_request_is_and_hints_at_the_body(
    server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str], status: int, members: dict[str, Any], told: str
) -> None:
    server[0].script = lambda call: call.answer(status=status, **members)
    assert bench(server[1], "--arrivals", "uniform", "--quiet") == 1
    assert re.search(f"^headway: the first error says: {told}", capsys.readouterr().err, re.MULTILINE)


def test_bench_says_that_no_request_fell_due(server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server[1], "--rate", "0.001", "--seed", "1") == 1
    assert "no request was due within 0.05 s" in capsys.readouterr().err


def test_progress_counts_each_outcome() -> None:
    record = Record(["paid", "free"])
    record.sent[:] = [4, 3_000]
    record.streams[0].answered.append(0.1)
    record.streams[1].refused.append(0.1)
    record.streams[1].failed.update({"429 SHED": 1, "timeout": 2})
    assert line(record, 12.4, 60.0) == "12 of 60 s: 3,004 sent, 1 answered, 1 refused, 2 failed, 3,000 in flight"


def test_nobody_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("127.0.0.1:1") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headway: no connection to 127.0.0.1:1: ")


def test_ctrl_c_shows_what_was_found(server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt_at_the_tenth(call: Call) -> None:
        call.answer()
        if call.number == 10:
            os.kill(os.getpid(), signal.SIGINT)

    server[0].script = interrupt_at_the_tenth
    assert bench(server[1], "--duration", "60", "--json") == 130
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"]
    assert sum(found["total"]["outcomes"].values()) == found["total"]["requests"] >= 11


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["h", "--rate", "nan"], "--rate = nan"),
        (["h", "--arrivals", "/nowhere.csv"], "--arrivals = '/nowhere.csv': cannot be read"),
        (["h", "--key", "paid=x"], "the mix has no tier 'paid'"),
        (["h", "--body", "/nowhere.json"], "--body = '/nowhere.json': cannot be read"),
        (["h", "--out", "/nowhere/out.json"], "--out = '/nowhere/out.json': cannot be written"),
        (["h", "--tensor", "FP32:1", "--input", "a"], "cannot be combined with --input or --body"),
    ],
)
def test_a_bad_setting_ends_it_at_once(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 3
    assert says in capsys.readouterr().err


LOAD = Load(questions=(), bound_ms=100.0)


def carries(most: float, late_ms: float = 0.1, failures: dict[str, int] | None = None) -> Callable[..., Verdict]:
    """Return a fake run that is VALID up to a rate."""

    def run(urls: Sequence[str], load: Load, rate: float, seconds: float, queries: int = 1) -> Verdict:
        result = "VALID" if rate <= most else "INVALID"
        late = Late(late_ms, 0.0, 0.0)
        return Verdict(result, "", True, rate, rate, 1000, 50.0, 90.0, 99.0, 120.0, failures or {}, 0, late)

    return run


def found(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Verdict], steps: int = 12) -> judge.Found:
    monkeypatch.setattr(judge, "_run", run)
    return judge.most(["http://127.0.0.1:1"], LOAD, 400.0, steps, lambda line: None)


@pytest.mark.parametrize("most", [50.0, 390.0, 400.0, 1234.0])
def test_the_highest_rate_that_holds_is_found(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    best = found(monkeypatch, carries(most)).best
    assert best is not None
    assert most / judge.WITHIN <= best.target_rate <= most


def test_nothing_is_reported_where_no_rate_holds_or_an_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = found(monkeypatch, carries(0.0), steps=3)
    assert outcome.best is None
    assert [run.target_rate for run in outcome.runs] == pytest.approx([400.0, 400.0 / 1.4, 400.0 / 1.96])
    assert found(monkeypatch, carries(1000.0, failures={"503": 1}), steps=2).best is None


def test_a_run_whose_client_was_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = found(monkeypatch, carries(1000.0, late_ms=2.1))
    assert outcome.runs == []
    assert "late by 2.1, 2.1, 2.1 ms (P99) at 400/s, and 2.0 is the most" in outcome.refused
