"""Counts, records and memory of requests that are answered, expire, are refused, or whose clients leave."""

import asyncio

import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.gateway.pending import FutureSink
from headway.model import EntryState, InferenceRequest, Reply, RequestOptions
from headway.runtime.request_id import new_id
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Fleet
from tests.virtual_time import Clock

WHO = (ANYBODY.user, ANYBODY.tenant)
GRAIN = 0.03
"""Seconds by which a deadline may be seen late."""


async def test_each_outcome_is_counted_and_noted_with_the_time_that_it_took(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(1.0), max_batch=1) as fleet:
        answered = fleet.ask("answered")
        expired = [fleet.ask(f"expired {number}", timeout=0.5) for number in range(2)]
        gone = [fleet.ask(f"gone {number}") for number in range(2)]
        await asyncio.sleep(0.2)
        for one in gone:
            fleet.gateway.abandon(one, ANYBODY.tenant, one.id)
        await fleet.answered(answered, *expired)
        assert fleet.backends[0].batches == [["answered"]]
        counts = {"ok": 1, "deadline_exceeded": 2, "cancelled": 2}
        assert fleet.counters.gateway.requests == {("m", "paid", outcome): count for outcome, count in counts.items()}
        took = {entry.input: seconds for entry, seconds, _ in fleet.journals[0].notes}
        assert took == pytest.approx(
            {"answered": 1.0, "expired 0": 0.5, "expired 1": 0.5, "gone 0": 0.2, "gone 1": 0.2}, abs=GRAIN
        )
        assert all((reply.id, reply.tenant) == (entry.id, entry.tenant) for entry, _, reply in fleet.journals[0].notes)
        latencies = fleet.counters.gateway.request_seconds["m", "paid"]
        assert latencies.count == 3 and latencies.sum == pytest.approx(2.0, abs=2 * GRAIN)


async def test_each_batch_is_counted_once_by_its_size_and_failures_apart(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(1.0), max_batch=2, queue_timeout_ms=2500) as fleet:
        asked = [fleet.ask(f"text {number}") for number in range(5)]
        await fleet.answered(*asked, fleet.ask("expired", timeout=0.5))
        runs = {key: (run.count, run.seconds) for key, run in fleet.counters.gateway.runs.items()}
        assert sum(size * count for (_, size), (count, _) in runs.items()) in (5, 6)
        assert {model for model, _ in runs} == {"m"} and all(size <= 2 for _, size in runs)
        batches = sum(count for count, _ in runs.values())
        assert batches == sum(fleet.counters.worker.batches.values())
        assert sum(seconds for _, seconds in runs.values()) == pytest.approx(1.0 * batches, abs=0.1)
        assert fleet.counters.gateway.last_answer == {"m": pytest.approx(clock(), abs=GRAIN)}
        assert fleet.counters.gateway.failed_seconds == {"m": pytest.approx(0.5, abs=GRAIN)}


async def test_headway_s_own_share_of_a_request_is_what_neither_the_queue_nor_the_run_took(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(1.0), max_batch=1) as fleet:
        await fleet.answered(*(fleet.ask(f"text {number}") for number in range(3)))
        waits, own = fleet.counters.gateway.queue_seconds["m", "paid"], fleet.counters.gateway.overhead_seconds
        assert waits.count == 3 and waits.sum == pytest.approx(3.0, abs=0.1)
        assert own.count == 3 and own.sum == pytest.approx(0.0, abs=0.1)


async def test_where_a_request_stands_is_known_while_it_is_held_and_afterwards(clock: Clock) -> None:
    async with Fleet(clock, FakeBackend(1.0), max_batch=1) as fleet:
        first, late = fleet.ask("first", tier=0), fleet.ask("late", timeout=0.5)
        await asyncio.sleep(0.2)
        standing = await fleet.gateway.status(late.id)
        assert standing is not None and standing.state is EntryState.QUEUED
        assert (standing.user, standing.tenant, standing.model, standing.tier) == (*WHO, "m", 1)
        assert standing.seconds == pytest.approx(0.2, abs=GRAIN)
        await fleet.answered(first, late)
        await asyncio.sleep(3.0)
        done, failed = [await fleet.gateway.status(one.id, ANYBODY.tenant) for one in (first, late)]
        assert done is not None and done.state is EntryState.COMPLETED
        assert (done.user, done.tenant, done.model, done.tier) == (*WHO, "m", 0)
        assert done.seconds == pytest.approx(1.0, abs=GRAIN) and done.since == pytest.approx(3.0, abs=GRAIN)
        assert done.ran is not None and done.ran.worker == "gpu-0"
        assert failed is not None and failed.state is EntryState.FAILED
        assert failed.failure is not None and failed.failure.code == errors.DEADLINE_EXCEEDED
        assert await fleet.gateway.status(first.id, "another") is None


async def test_an_answer_that_could_not_be_written_is_told_to_operators_and_hurts_nobody_else(clock: Clock) -> None:
    class Broken(FutureSink):
        def answer(self, reply: Reply) -> None:
            raise RuntimeError("connection object is broken")

    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        with capture_logs() as lines:
            fleet.gateway.submit(
                Broken(), InferenceRequest(ANYBODY, id := new_id(), RequestOptions(4.0, 1), "m", "a", b"")
            )
            assert await fleet.answered(fleet.ask("b")) == ["ok"]
            await fleet.gateway.emptied()
        [line] = [line for line in lines if line["log_level"] == "error"]
        assert line["request_id"] == id and line["exc_info"]


async def test_an_observer_that_fails_costs_nobody_an_answer(clock: Clock) -> None:
    def fail(*facts: object) -> None:
        raise RuntimeError("the observer is broken")

    async with Fleet(clock, FakeBackend(0.1)) as fleet:
        fleet.journals[0].finished = fail  # type: ignore[assignment, method-assign]
        with capture_logs() as lines:
            assert await fleet.answered(fleet.ask("a"), fleet.ask("b")) == ["ok", "ok"]
        assert [line["event"] for line in lines if line["log_level"] == "error"] == [
            "an observer of requests has failed"
        ]
