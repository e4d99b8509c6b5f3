"""Loops end when their supervisor stops, and a race ends its other waits when the first is over."""

import ast
import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import headway
from headway.app.lifecycle import CONNECT_EVERY, CONNECT_WITHIN, Service
from headway.config import Settings
from headway.doors.readiness import within_answer_time
from headway.errors import BrokerUnavailable, SettingError, StoreUnavailable
from headway.runtime.periodic import Periodic
from headway.runtime.race import MOST_TRIES, TIDIES, end, race
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.services.roles import FakeDoor
from tests.services.stand import Stand
from tests.virtual_time import Clock


async def test_who_is_cancelled_as_the_broker_answers_ends(clock: Clock) -> None:
    answer = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(within_answer_time(answer))
    await asyncio.sleep(0)
    answer.set_result("here")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_loop_has_time_to_tidy_up(clock: Clock) -> None:
    tidied = False

    async def loop() -> None:
        nonlocal tidied
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.9 * TIDIES)
            tidied = True

    supervisor = Supervisor()
    supervisor.start("tidy", loop)
    await asyncio.sleep(1.0)
    await supervisor.stop()
    assert tidied


async def test_a_loop_whose_call_fails_as_it_is_cancelled_ends_at_once(clock: Clock) -> None:
    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise BrokerUnavailable("the connection was closed") from None

    async def act() -> None:
        await asyncio.gather(failing(), asyncio.Event().wait())

    supervisor = Supervisor()
    Periodic("asking", act, clock).start(supervisor)
    await asyncio.sleep(1.0)
    began = clock()
    with capture_logs() as logs:
        await supervisor.stop()
    assert clock() == began
    assert "task does not end, cancelling it again" not in [line["event"] for line in logs]


async def test_who_stops_waiting_for_the_last_call_of_a_loop_does_not_start_it_again(clock: Clock) -> None:
    calls, supervisor = list[str](), Supervisor()

    async def act() -> None:
        calls.append("begun")
        await asyncio.Event().wait()

    periodic = Periodic("looks", act, clock)
    with capture_logs() as logs:
        periodic.start(supervisor)
        await asyncio.sleep(0.1)
        stopping = asyncio.ensure_future(periodic.stop())
        await asyncio.sleep(0.1)
        stopping.cancel()
        await asyncio.sleep(100.0)
        assert stopping.cancelled()
        await supervisor.stop()
    assert (calls, logs) == (["begun"], [])


async def over(seconds: float, ended: list[float], fails: bool = False) -> float:
    """Sleep, and record when the sleep ends for any reason. Ending takes a moment."""
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.sleep(0.01)
        ended.append(seconds)
    if fails:
        raise ValueError("lost")
    return seconds


async def test_the_first_that_is_over_or_fails_ends_the_others(clock: Clock) -> None:
    ended: list[float] = []
    first, second, third = await race(over(3.0, ended), over(1.0, ended), over(2.0, ended))
    assert first is third is None and second is not None and second.result() == 1.0
    assert sorted(ended) == [1.0, 2.0, 3.0], "all of them have ended"
    assert clock() == pytest.approx(1000.0 + 1.02)
    first, second = await race(over(1.0, [], fails=True), over(2.0, []))
    assert second is None and first is not None and isinstance(first.exception(), ValueError)


async def test_who_cancels_a_race_ends_all_of_it(clock: Clock) -> None:
    ended: list[float] = []
    racing = asyncio.ensure_future(race(over(1.0, ended), over(2.0, ended)))
    await asyncio.sleep(0.5)
    racing.cancel()
    await asyncio.gather(racing, return_exceptions=True)
    assert racing.cancelled() and sorted(ended) == [1.0, 2.0]


async def deaf(times: int) -> None:
    """Ignore the first `times` cancellations."""
    for _ in range(times + 1):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_what_loses_its_cancellation_is_cancelled_again_and_named(clock: Clock, lost: int) -> None:
    task = asyncio.get_running_loop().create_task(deaf(lost), name="deaf")
    await asyncio.sleep(0)
    began = clock()
    with capture_logs() as logs:
        await end(None, task, tidies=2.0)
    assert task.done() and clock() - began == 2.0 * lost
    assert [line["tasks"] for line in logs] == [["deaf: deaf"]] * lost


async def test_what_heeds_no_cancellation_is_left_running_and_named(clock: Clock) -> None:
    task = asyncio.get_running_loop().create_task(deaf(MOST_TRIES), name="deaf")
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await end(task)
    assert not task.done()
    assert (logs[-1]["event"], logs[-1]["tasks"]) == ("task does not end, and is left running", ["deaf: deaf"])
    await end(task)


class Noting:
    def __init__(self, name: str, notes: list[str], *failures: Exception) -> None:
        self._name = name
        self._notes = notes
        self._failures = list(failures)

    def _note(self, what: str) -> None:
        self._notes.append(f"{what} {self._name}")

    async def open(self) -> None:
        self._note("open")
        if self._failures:
            raise self._failures.pop(0)

    def start(self, supervisor: Supervisor) -> None:
        self._note("start")
        supervisor.start(self._name, self._loop)

    async def _loop(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._note("end")

    async def close(self) -> None:
        self._note("close")


def service(clock: Clock, notes: list[str], *resources: Noting) -> Service:
    stand = Stand(clock, FakeBackend(0.1))
    return Service(Settings(), stand.broker, stand.gateway, stand.pool, [FakeDoor("door", notes)], resources=resources)


async def test_resources_are_there_before_the_first_request_and_until_after_the_last(clock: Clock) -> None:
    notes: list[str] = []
    process = service(clock, notes, Noting("a", notes), Noting("b", notes))
    await process.start()
    await asyncio.sleep(1)
    await process.stop()
    await process.stop()
    assert notes == [
        *("door binds", "open a", "open b", "start a", "start b", "door opens"),
        *("door closes", "end a", "end b", "close b", "close a", "door closes"),
    ]


async def test_a_store_that_does_not_come_ends_the_start(clock: Clock) -> None:
    notes: list[str] = []
    away = [StoreUnavailable("it is away.")] * 1000
    began = clock()
    with pytest.raises(StoreUnavailable, match=r"it is away; given up after 30 s\. Start the store, or") as caught:
        await service(clock, notes, Noting("a", notes), Noting("b", notes, *away)).start()
    assert "--ledger" in str(caught.value)
    assert clock() - began == pytest.approx(CONNECT_WITHIN, abs=CONNECT_EVERY)
    assert notes[-2:] == ["close b", "close a"]
    assert "door opens" not in notes


async def test_one_that_will_not_do_ends_the_start_at_once(clock: Clock) -> None:
    notes: list[str] = []
    with pytest.raises(SettingError):
        await service(clock, notes, Noting("a", notes, SettingError("x", 1, "is wrong", "Fix it."))).start()
    assert notes == ["door binds", "open a", "door closes", "close a"]


ROOT = Path(headway.__file__).parent


def awaited(function: ast.AsyncFunctionDef, cancelled: set[str]) -> list[int]:
    """Return the lines where a function waits for something it cancelled, or for tasks whatever their outcome."""
    waits = [
        node for node in ast.walk(function) if isinstance(node, ast.Await) and ast.unparse(node.value) in cancelled
    ]
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    several = [
        call
        for call in calls
        if ast.unparse(call.func) == "asyncio.wait" or any(how.arg == "return_exceptions" for how in call.keywords)
    ]
    return [node.lineno for node in (*waits, *several)]


def test_nobody_cancels_once_and_waits() -> None:
    """A function that cancels something and waits for it uses `end`, except in the client, which doesn't have it."""
    found = set[str]()
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(source)) if ".cancel(" in source else ():
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            called = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            cancels = {
                ast.unparse(call.func.value): call.lineno
                for call in called
                if isinstance(call.func, ast.Attribute) and call.func.attr == "cancel"
            }
            if cancels and any(line >= min(cancels.values()) for line in awaited(function, {*cancels})):
                found.add(f"{path.relative_to(ROOT)}: {function.name}")
    assert found == {"client/async_client.py: infer_many", "runtime/race.py: end"}
