import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from time import perf_counter

import pytest
import uvloop

from headway.core.arrivals import replay
from headway.errors import SettingError
from headway.load.generator import Alarm, TraceFile, due_times
from headway.load.spec import LoadSpec, Target
from tests.scenes import Played


def order(arrivals: str, seed: int = 1) -> LoadSpec:
    return LoadSpec(target=Target("h", 80, "h", "/"), rate=100.0, duration=1.0, arrivals=arrivals, seed=seed)


def test_dues_end_with_the_duration_and_are_those_of_their_seed() -> None:
    assert list(due_times(order("uniform"))) == [number / 100 for number in range(100)]
    poisson = list(due_times(order("poisson")))
    assert 0.9 < poisson[-1] < 1.0
    assert 60 < len(poisson) < 140
    assert list(due_times(order("poisson"))) == list(due_times(order("poisson")))
    assert list(due_times(order("poisson"))) != list(due_times(order("poisson", seed=2)))


def test_a_trace_is_replayed_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP\r\n10\r\n11\r\n13\r\n")
    dues = list(due_times(order(str(path))))
    assert dues[:4] == pytest.approx([0, 1 / 150, 3 / 150, 3 / 100])
    assert dues[-1] == pytest.approx(0.99 + 1 / 150)
    assert list(islice(replay(TraceFile(path), 100.0), len(dues))) == dues


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"TIMESTAMP\n1\n\xff\n", "is not UTF-8 text"),
        (b"TIMESTAMP\n1\n2\n1\n", "line 4.*earlier"),
        (b"", "has no rate"),
    ],
)
def test_a_trace_that_is_none_is_refused_before_the_load(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=says):
        due_times(order(str(path)))
    with pytest.raises(SettingError, match=r"--arrivals = 'poison'.*Use poisson, uniform, or the path"):
        due_times(order("poison"))


Body = Callable[[Callable[[Callable[[], None]], Alarm]], Awaitable[None]]


@pytest.fixture(params=[True, False], ids=["precise", "plain"])
def precise(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def make(request: pytest.FixtureRequest, precise: bool) -> Played:
    def run(body: Body) -> None:
        async def drive() -> None:
            loop = asyncio.get_running_loop()
            await body(lambda ring: Alarm(loop, ring, precise=precise))

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(drive())

    return Played(run)


async def test_an_alarm_rings_once_and_not_too_early_is_armed_anew_and_closed(
    make: Callable[[Callable[[], None]], Alarm],
) -> None:
    rung: list[float] = []
    event = asyncio.Event()

    def ring() -> None:
        rung.append(perf_counter())
        event.set()

    alarm = make(ring)
    start = perf_counter()
    alarm.arm(3_600.0)
    alarm.arm(0.004)
    await event.wait()
    # uvloop rounds its own timers to the nearest millisecond.
    assert rung[0] - start >= 0.003
    await ring_after(make, 0.003)
    assert len(rung) == 1
    event.clear()
    alarm.arm(0.0)
    await event.wait()
    alarm.arm(0.0)
    alarm.close()
    alarm.close()
    await ring_after(make, 0.002)
    assert len(rung) == 2


async def ring_after(make: Callable[[Callable[[], None]], Alarm], seconds: float) -> None:
    """Arm another alarm, and wait until it rings."""
    rung = asyncio.Event()
    alarm = make(rung.set)
    alarm.arm(seconds)
    await rung.wait()
    alarm.close()
