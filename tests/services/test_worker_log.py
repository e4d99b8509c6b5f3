"""A worker's log: how its backend starts, what is wrong with its pace, and failed batches, told once per input."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from headway.errors import BatchRaised, BatchTimeout, TargetError
from headway.model import BatchFailure, Cause, Entry, ItemResult, Lease, Slot
from headway.worker import failure_log
from headway.worker.failure_log import FailureLog
from headway.worker.starting import Limits, StartState, start
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import Clock, run

SLOT = Slot("gpu-0", "m", 8)


class Slow(FakeBackend):
    """A backend whose first batch takes `first` seconds and the others `seconds`. It times out like a process."""

    def __init__(self, first: float, seconds: float) -> None:
        super().__init__(seconds)
        self._first = first

    async def start(self) -> float:
        await super().start()
        await asyncio.sleep(self._first)
        return self._first

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        if self.seconds > timeout:
            await asyncio.sleep(timeout)
            raise BatchTimeout("took longer")
        return await super().run(entries, timeout)


def started(backend: FakeBackend, limits: Limits, fresh: bool = True) -> list[Any]:
    async def main(clock: Clock) -> None:
        await start(backend, SLOT, limits, clock, fresh=fresh)

    with capture_logs() as logs:
        run(main)
    return logs


def test_a_start_is_told_of_when_it_begins_and_when_it_ends() -> None:
    backend = FakeBackend(0.1)
    backend.start_seconds = 6.1
    loading, loaded = started(backend, Limits(3.0))
    assert (loading["event"], loading["worker"], loading["log_level"]) == ("loading", "gpu-0", "info")
    assert (loaded["event"], loaded["worker"]) == ("loaded", "gpu-0")
    assert (loaded["seconds"], loaded["warm_up_ms"]) == (6.0, 100.0)
    assert backend.batches == [], "a model that is fast enough runs no second batch"


@pytest.mark.parametrize(
    ("limits", "says", "mend"),
    [
        (Limits(3.0, 30.0), "longer than --gpu-timeout-ms 3000", "--gpu-timeout-ms 10000,"),
        (Limits(10.0, 4.0), "longer than --request-timeout-ms 4000", "--request-timeout-ms 20000,"),
        (
            Limits(3.0, 4.0, 2.0),
            "longer than --gpu-timeout-ms 3000",
            "--gpu-timeout-ms 10000 --queue-timeout-ms 10000 --request-timeout-ms 20000,",
        ),
    ],
)
def test_a_model_slower_than_its_deadline_is_told_what_fits(limits: Limits, says: str, mend: str) -> None:
    with pytest.raises(TargetError) as caught:
        started(Slow(5.0, 5.0), limits)
    assert "takes 5000 ms for one input" in str(caught.value)
    assert says in str(caught.value)
    assert f"Start with {mend} or make the model faster." in str(caught.value)


def test_a_second_warm_up_batch_decides_where_the_first_one_is_slow_but_not_of_a_model_that_has_served() -> None:
    backend = Slow(20.0, 0.2)
    [_, loaded] = started(backend, Limits(3.0))
    assert (loaded["warm_up_ms"], loaded["second_ms"]) == (20_000.0, 200.0), "it may have to compile something"
    assert backend.batches == [["warm-up"]]
    failing = FakeBackend(5.0, lambda entries: BatchRaised("ValueError: once only"))
    with pytest.raises(TargetError, match="second warm-up batch failed: ValueError: once only"):
        started(failing, Limits(3.0))
    started(Slow(5.0, 5.0), Limits(3.0), fresh=False)


def test_a_worker_without_gateway_says_what_gateways_need_unless_no_deadline_is_long_enough() -> None:
    with pytest.raises(TargetError, match="gateways need at least --queue-timeout-ms 10000 --request-timeout-ms 20000"):
        started(Slow(5.0, 5.0), Limits(3.0))
    with pytest.raises(TargetError, match="Make the model faster: no deadline may exceed 600000 ms"):
        started(Slow(700.0, 700.0), Limits(3.0, 4.0, 2.0))


def test_a_model_slower_than_the_queue_deadline_is_told_of() -> None:
    [_, _, warning] = started(Slow(2.5, 2.5), Limits(3.0, 4.0, 2.0))
    assert "longer than the queue deadline" in warning["event"]
    assert warning["hint"].startswith(
        "Start with --gpu-timeout-ms 5000 --queue-timeout-ms 5000 --request-timeout-ms 10000,"
    )
    assert len(started(Slow(2.5, 0.5), Limits(3.0, 4.0, 2.0))) == 2, "a second batch decides"


@pytest.mark.parametrize(
    ("ran", "full_ms", "smaller"),
    [
        ([(1, 0.4), (8, 3.2)], 3200.0, "Start with --max-batch-size 7. Or: "),
        ([(1, 0.6), (6, 3.1)], 4100.0, "Start with --max-batch-size 5. Or: "),
    ],
)
def test_full_batches_over_the_deadline_are_named(ran: list[tuple[int, float]], full_ms: float, smaller: str) -> None:
    backend = FakeBackend(0.4)
    backend.warm_up = ran
    [_, _, warning] = started(backend, Limits(3.0, 4.0, 3.0))
    assert "full batches take longer than the GPU deadline" in warning["event"]
    assert (warning["size"], warning["full_batch_ms"], warning["gpu_timeout_ms"]) == (8, full_ms, 3000.0)
    assert warning["hint"].startswith(f"{smaller}Start with --gpu-timeout-ms")
    assert len(started(backend, Limits(3.0, 4.0, 3.0), fresh=False)) == 2, "that a worker is replaced is no news of it"
    backend.warm_up = [(1, 0.4), (2, 0.7)]
    assert len(started(backend, Limits(3.0, 4.0, 3.0))) == 2, "eight take 2.5 s"


async def test_full_batches_that_turn_out_too_slow_in_service_are_told_of_once(clock: Clock) -> None:
    backend = FakeBackend(script=lambda entries: setattr(backend, "seconds", 0.6 * len(entries)))
    with capture_logs() as logs:
        async with Stand(clock, backend, policy="window", max_wait_ms=0) as stand:
            for count in (1, 4):
                await asyncio.gather(*(stand.ask("x") for _ in range(count)))
                await asyncio.sleep(5.0)
            assert not any("GPU deadline" in line["event"] for line in logs), "two batches may have been held up"
            for _ in range(2):
                await asyncio.gather(*(stand.ask("x") for _ in range(4)))
                await asyncio.sleep(5.0)
    [warning] = [line for line in logs if "longer than the GPU deadline" in line["event"]]
    assert warning["full_batch_ms"] == pytest.approx(4800.0)
    assert warning["hint"].startswith("Start with --max-batch-size ")


def test_a_slot_that_is_not_up_tells_the_error_of_its_last_batch() -> None:
    state = StartState()
    assert state.reason(0.0) == ""
    assert state.rests(0.0) == "rests after failed batches"
    state.cause = "died of SIGKILL"
    assert state.reason(0.0) == "restarts; the last error: died of SIGKILL"
    assert state.reason(0.0, held=True) == "restarts once it is undrained; the last error: died of SIGKILL"
    assert state.rests(7.0) == "rests for 7 s, as the API requested; the last error: died of SIGKILL"
    state.since = 1.0
    assert state.reason(4.0) == "has been loading for 3 s; the last error: died of SIGKILL"
    state.since, state.trouble = None, "it does not load"
    assert state.reason(4.0) == "it does not load"


def of_inputs(*ids: str, reason: str = "early") -> Lease:
    entries = [Entry(id, "m", id, 0, "t", "u", 1.0, 1.0) for id in ids]
    return Lease(1, Slot("gpu-0", "m", 8), entries, reason, 0.0, 1.0, 1.0)


def told(log: FailureLog, *batches: Lease, cause: Cause = Cause.RAISED, trace: str = "Traceback") -> list[Any]:
    with capture_logs() as logs:
        for batch in batches:
            log.failed("gpu-0", batch, BatchFailure(cause, "ValueError: bad", "gpu-0"), trace)
    return [line for line in logs if line["log_level"] == "warning"]


def test_the_search_for_a_culprit_is_two_lines() -> None:
    search = [of_inputs("a", "b", "c", "bad"), of_inputs("c", "bad", reason="retry"), of_inputs("bad", reason="retry")]
    whole, alone = told(FailureLog(3.0), *search, of_inputs("bad", reason="retry"))
    assert (whole["size"], whole["exception"]) == (4, "Traceback")
    assert "request_id" not in whole
    assert (alone["size"], alone["request_id"]) == (1, "req_bad")
    assert "exception" not in alone, "the traceback is told once"


def test_an_input_that_fails_alone_twice_is_one_line_and_others_are_stories_of_their_own() -> None:
    [line] = told(FailureLog(3.0), of_inputs("bad"), of_inputs("bad", reason="retry"))
    assert (line["request_id"], line["exception"], line["error"]) == ("req_bad", "Traceback", "ValueError: bad")
    log = FailureLog(3.0)
    assert len(told(log, of_inputs("bad"), of_inputs("worse"), of_inputs("bad", "worse"))) == 2
    assert len(told(log, of_inputs("bad"), cause=Cause.CRASHED)) == 1


def test_a_batch_beyond_the_deadline_says_how_to_mend_that() -> None:
    log = FailureLog(3.0)
    [many] = told(log, of_inputs("a", "b"), cause=Cause.TIMEOUT, trace="")
    [one] = told(log, of_inputs("c"), cause=Cause.TIMEOUT, trace="")
    assert many["hint"] == "raise --gpu-timeout-ms (3000) if the model needs longer, or lower --max-batch-size"
    assert one["hint"] == "raise --gpu-timeout-ms (3000) if the model needs longer"


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(failure_log, "REMEMBERED", 3)
    log = FailureLog(3.0)
    assert len(told(log, *(of_inputs(str(number)) for number in range(10)))) == 10
    assert told(log, of_inputs("9")) == []
    assert len(told(log, of_inputs("0"))) == 1


def test_what_a_target_raises_at_the_start_of_many_workers_is_told_once() -> None:
    log = FailureLog(3.0)
    with capture_logs() as logs:
        for worker in ("gpu-0", "gpu-1", "gpu-0"):
            log.not_started(worker, TargetError("target m:f: importing it raised ValueError", "Traceback of f"))
        log.not_started("gpu-0", TargetError("target m:f: not there"))
        log.not_started("gpu-0", TargetError("target m:f: importing it raised KeyError", "Traceback of another"))
    assert [line["exception"] for line in logs] == ["Traceback of f", "Traceback of another"]
    assert {line["log_level"] for line in logs} == {"error"}
