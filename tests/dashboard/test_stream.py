"""The dashboard's event stream: its events, reconnecting, slow viewers and rejected ones."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from headway.admin.dashboard.hub import (
    BUFFER,
    DROP_GRACE,
    MOST_VIEWERS,
    REMEMBERED,
    TICK,
    WINDOW,
    FleetHistory,
    Viewer,
    percentiles,
)
from headway.core.departure_board import HISTORY_SECONDS, STEP
from headway.http.routing import StreamedAnswer
from headway.http.server.connection_context import STREAM_BYTES, STREAM_SILENCE, bound
from headway.model.board import ARRIVED, FleetFigures, Notice, RequestFlow
from tests import virtual_time
from tests.http.away import Away
from tests.http.ordinary import request
from tests.http.test_admin import Port, Touchy, on_admin
from tests.http.test_admin_guard import HERE, TOKEN, cookie_in, sign_in
from tests.services.stand import Stand


class Tab:
    """An open stream. Clear `reads` to make its client stop reading."""

    def __init__(self, port: Port, **fields: str) -> None:
        self.events: list[tuple[str, str, Any]] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.cut = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.shut = asyncio.Event()
        self._heard = asyncio.Event()
        self._text = b""
        headers = {"host": "127.0.0.1:9000", **{name.replace("_", "-"): value for name, value in fields.items()}}
        self._request = request("GET", "/internal/events", headers)
        self._request.shut, self._request.cut = self.shut, self._cut
        self.running = asyncio.ensure_future(self._run(port))

    async def until(self, kind: str, count: int = 1) -> Any:
        """Wait for the `count`-th event of a kind, and return its data."""
        while len(found := [data for name, _, data in self.events if name == kind]) < count:
            assert not self.running.done(), self.events
            self._heard.clear()
            await self._heard.wait()
        return found[count - 1]

    async def leave(self) -> None:
        self._request.leave()
        await self.running

    @property
    def last(self) -> str:
        return self.events[-1][1]

    def _cut(self) -> None:
        self.cut = True
        self.reads.set()
        self._request.leave()

    async def _run(self, port: Port) -> None:
        answer = await port.app(self._request)
        self.status, self.headers = answer.status, answer.headers
        if not isinstance(answer, StreamedAnswer):
            self._text = answer.body
            return
        async with contextlib.aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                await self.reads.wait()
                if self._request.gone:
                    return
                self._take(piece)

    def _take(self, piece: bytes) -> None:
        self._text += piece
        *whole, self._text = self._text.split(b"\n\n")
        for event in whole:
            fields = dict(line.split(": ", 1) for line in event.decode().split("\n"))
            if "event" in fields:
                self.events.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
        self._heard.set()


@on_admin()
async def test_a_stream_begins_with_everything_and_goes_on_with_what_is_new(stand: Stand, port: Port) -> None:
    await asyncio.gather(*(stand.asking(f"text {number}", tier=number % 3) for number in range(6)))
    await asyncio.sleep(3)
    tab = Tab(port)
    start = await tab.until("start")
    assert tab.headers["content-type"].startswith("text/event-stream")
    assert (tab.headers["x-accel-buffering"], tab.headers["cache-control"]) == ("no", "no-store")
    assert "content-length" not in tab.headers
    assert (start["role"], start["tiers"], start["promise_ms"]) == ("serve", ["enterprise", "paid", "free"], 200.0)
    assert sum(one[4] for one in start["departures"]) == 6
    assert sum(row[2] for row in start["rows"]) * STEP == 6
    assert [worker["status"] for worker in start["snapshot"]["workers"]] == ["healthy"]
    assert [change[3] for change in start["changes"]] == ["starting", "healthy"]
    await stand.ask("one more")
    while not (tick := await tab.until("tick", sum(name == "tick" for name, _, _ in tab.events) + 1))["departures"]:
        assert "worker_id" not in str(tick.get("departures"))
    assert {one[9] for one in tick["departures"]} <= {"", ARRIVED}
    await tab.leave()


@on_admin()
async def test_a_quiet_fleet_is_heard_of_every_second(stand: Stand, port: Port) -> None:
    tab, loop = Tab(port), asyncio.get_running_loop()
    await tab.until("tick")
    begun = loop.time()
    await tab.until("tick", 6)
    assert loop.time() - begun <= 5 * 2 * TICK + TICK
    await tab.leave()


@on_admin()
async def test_a_tab_that_comes_back_gets_what_it_has_missed(stand: Stand, port: Port) -> None:
    stays, leaves = Tab(port), Tab(port)
    await leaves.until("tick", 2)
    await leaves.leave()
    await stand.ask("meanwhile")
    await asyncio.sleep(5)
    back = Tab(port, last_event_id=leaves.last)
    await back.until("tick", 3)
    assert "start" not in {name for name, _, _ in back.events}
    known = [id for _, id, _ in stays.events]
    again = [id for _, id, _ in back.events]
    assert again == known[known.index(leaves.last) + 1 :][: len(again)], "all that were sent since, in order, once"
    for unknown in ("", "x", "other-1", "-", leaves.last.split("-")[0] + "-99999", leaves.last.split("-")[0] + "-٣"):
        fresh = Tab(port, last_event_id=unknown.encode().decode("latin-1"))
        await fresh.until("start")
        await fresh.leave()
    await asyncio.sleep((REMEMBERED + 10) * 2 * TICK)
    late = Tab(port, last_event_id=leaves.last)
    await late.until("start")
    for tab in (stays, back, late):
        await tab.leave()


@on_admin()
async def test_a_tab_that_reads_nothing_is_dropped_and_told_and_costs_others_nothing(stand: Stand, port: Port) -> None:
    slow, silent, quick = Tab(port), Tab(port), Tab(port)
    for tab in (slow, silent):
        await tab.until("tick")
        tab.reads.clear()
    before = len(quick.events)
    await asyncio.sleep((BUFFER + 4) * 2 * TICK)
    assert len(quick.events) >= before + BUFFER
    assert not slow.cut
    slow.reads.set()
    assert "did not take its events in time" in (await slow.until("dropped"))["reason"]
    await slow.running
    await asyncio.sleep(DROP_GRACE)
    assert silent.cut, "it never reads again"
    await silent.running
    await quick.leave()


def test_a_buffer_is_bounded_and_comes_as_one_piece() -> None:
    async def main(_: Callable[[], float]) -> None:
        viewer = Viewer(lambda: None)
        for number in range(3):
            viewer.offer(b"%d" % number)
        assert await viewer.next() == b"012"
        for number in range(BUFFER + 10):
            viewer.offer(b"%d" % number)
        assert b"dropped" in (await viewer.next() or b"")
        assert await viewer.next() is None
        viewer.left()

    virtual_time.run(main)


@on_admin(admin_token=TOKEN)
async def test_a_stream_ends_with_its_session_and_with_the_port(stand: Stand, port: Port) -> None:
    assert (await port.get("/internal/events")).status == 401
    cookie = cookie_in(await sign_in(port))
    signed_in, other = Tab(port, cookie=cookie), Tab(port, cookie=cookie_in(await sign_in(port)))
    for tab in (signed_in, other):
        await tab.until("start")
    await port.ask("DELETE", "/dashboard/session", fields={**HERE, "cookie": cookie})
    await asyncio.wait_for(signed_in.running, 2 * TICK + 0.1)
    assert not other.running.done()
    other.shut.set()
    await asyncio.wait_for(other.running, 2 * TICK)


@on_admin()
async def test_there_are_only_so_many_streams(stand: Stand, port: Port) -> None:
    tabs = [Tab(port) for _ in range(MOST_VIEWERS)]
    await tabs[-1].until("start")
    refused = await port.get("/internal/events")
    assert (refused.status, refused.json["error"]) == (503, "SERVICE_OVERLOADED")
    await asyncio.gather(*(tab.leave() for tab in tabs))
    last = Tab(port)
    await last.until("start")
    await last.leave()


@on_admin(backend=Touchy())
async def test_while_the_broker_is_away_a_page_is_shown_what_was_known_with_its_age(stand: Stand, _: Port) -> None:
    away = Away(stand)
    away.back.set()
    port = Port(stand, broker=away)
    stays = Tab(port)
    await stand.ask("text")
    ended = None
    while not ended:
        tick = await stays.until("tick", sum(name == "tick" for name, _, _ in stays.events) + 1)
        ended = tick.get("recent", {}).get("ended")  # Not every tick covers the whole fleet.
    away.back.clear()
    await asyncio.sleep(30.0)
    [tick] = [data for name, _, data in stays.events if name == "tick"][-1:]
    later = Tab(port)
    for told in (tick, await later.until("start")):
        assert told["away"] == "connection refused"
        assert 28.0 < told["snapshot"]["age_seconds"] < 31.0
        assert told["snapshot"]["workers"]
        assert told["now"] == pytest.approx(told["snapshot"]["now"], abs=0.01), "time goes on"
        assert told["recent"]["ended"] == {"m": 1 / WINDOW}, "the rates are those of then"
    for tab in (stays, later):
        await tab.leave()


@on_admin(backend=Touchy())
async def test_without_the_broker_the_stream_says_so_until_it_is_back(stand: Stand, _: Port) -> None:
    away = Away(stand)
    tab = Tab(Port(stand, broker=away))
    start = await tab.until("start")
    assert (start["away"], start["snapshot"]) == ("connection refused", None)
    away.back.set()
    while (tick := await tab.until("tick", sum(name == "tick" for name, _, _ in tab.events) + 1))["away"]:
        pass
    assert tick["snapshot"]["workers"]
    await tab.leave()


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/main.js", "/dashboard/style.css", "/dashboard/icon.svg"])
@on_admin(admin_token=TOKEN)
async def test_the_page_needs_no_credential_under_a_strict_policy(stand: Stand, port: Port, path: str) -> None:
    page = await port.get(path)
    assert page.status == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert (await port.ask("GET", path, fields={"if-none-match": page.headers["etag"]})).status == 304
    assert (await port.ask("GET", path, host="evil.example")).status == 403
    for missing in ("/dashboard/../routes.py", "/dashboard/main.py", "/dashboard/"):
        assert (await port.get(missing)).status == 404


def test_percentiles_lie_within_their_buckets() -> None:
    assert percentiles([0] * 31) == [None, None, None]
    assert percentiles([0, 0, 10]) == [0.0015, 0.0019, 0.002]
    assert percentiles([0] * 30 + [5]) == [600.0] * 3, "what is above all bounds counts as the last of them"


def test_history_adds_up_over_processes_and_is_bounded() -> None:
    history = FleetHistory(["paid", "free"])
    flow = RequestFlow(1.0, {"paid": 4}, {"shed": 2}, {"shed": 2}, {"m": 6}, {"paid": {3: 4}}, {"crashed": 1})
    for process in ("a", "b"):
        history.add(Notice(process, flow=flow, at=100.5))
    history.add(Notice("a", fleet=FleetFigures((1, 2), (0.1, 0.3), 90.0, 70.0, 2, 3), at=100.9))
    [row] = history.changed()
    assert row[:5] == [100, 6.0, 4.0, 2.0, 2.0]
    assert row[5:8] == pytest.approx([0.0035, 0.00485, 0.005], abs=1e-4)
    assert row[8:] == [(1, 2), 0.3, 90.0, 70.0, 2]
    assert history.changed() == []
    recent = history.recent(101.0)
    assert recent["processes"] == {"a": 6 / WINDOW, "b": 6 / WINDOW}
    assert (recent["refused"], recent["retries"], recent["ended"]) == (
        {"shed": 4 / WINDOW}, {"crashed": 2 / WINDOW}, {"m": 12 / WINDOW},
    )  # fmt: skip
    assert [tier["answered"] for tier in recent["tiers"]] == [8 / WINDOW, 0.0]
    assert history.recent(100.5 + WINDOW + 1)["ended"] == {}
    for second in range(HISTORY_SECONDS + 100):
        history.add(Notice("a", flow=flow, at=200.0 + second))
    assert len(history.rows()) <= HISTORY_SECONDS // STEP + 1


async def test_the_kernel_keeps_little_of_a_stream_and_notices_a_network_that_is_gone() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        bound(writer.transport)
        connected = writer.get_extra_info("socket")
        kept = connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert kept <= 2 * STREAM_BYTES, "Linux doubles what it is told"
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STREAM_SILENCE * 1000
        for one in (writer, *held):
            one.close()
