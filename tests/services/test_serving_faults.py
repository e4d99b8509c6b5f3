"""Inputs and backends that fail: who is hurt, who rests, and who is told what, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headway import errors
from headway.core.breaker import Breaker, State
from headway.core.retry import RetryBudget
from headway.errors import BackendError, BatchRaised, RemoteAbsent, RemoteError, WorkerCrashed
from headway.model import WARM_UP, Entry, ItemResult, WorkerStatus
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand, codes
from tests.services.test_serving_workers import Api
from tests.virtual_time import Clock


def poison(entries: Sequence[Entry]) -> BackendError | None:
    if any("poison" in str(entry.input) for entry in entries):
        return BatchRaised("ValueError: poison")
    return None


@pytest.mark.parametrize("workers", [1, 2])
async def test_one_bad_input_does_not_hurt_its_batch_mates(workers: int, clock: Clock) -> None:
    backends = [FakeBackend(0.05, poison) for _ in range(workers)]
    async with Stand(clock, *backends, max_batch=32) as stand:
        texts = [f"good {number}" for number in range(31)]
        texts.insert(17, "poison")
        replies = await asyncio.gather(*(stand.ask(text) for text in texts))
        bad = replies.pop(17)
        assert codes([bad]) == [errors.REJECTED_BY_MODEL]
        assert [reply.output for reply in replies] == [t.upper() for t in texts if t != "poison"]
        [letter] = await stand.dead.list()
        [found] = await stand.dead.find(letter.entry.id)
        assert found.entry.input == "poison" and "ValueError" in letter.error
        for backend in backends:
            runs_with_poison = [batch for batch in backend.batches if "poison" in batch]
            assert all(len(batch) <= 32 for batch in runs_with_poison)


async def test_a_failing_backend_opens_the_breaker_and_recovers(clock: Clock) -> None:
    broken = True
    backend = FakeBackend(0.01, lambda entries: BatchRaised("CUDA error") if broken else None)
    async with Stand(clock, backend, max_batch=1) as stand:
        for number in range(8):
            await stand.ask(f"bad {number}", timeout=1.0)
        statuses = {worker.status for worker in await stand.broker.workers()}
        assert statuses == {WorkerStatus.DEGRADED}
        runs = len(backend.batches)
        assert runs < 8 * 3
        assert stand.counters.breaker_state["gpu-0"] == State.OPEN
        broken = False
        reply = await stand.ask("good", timeout=4.0)
        while reply.output is None:
            reply = await stand.ask("good", timeout=4.0)
        statuses = {worker.status for worker in await stand.broker.workers()}
        assert statuses == {WorkerStatus.HEALTHY}
        assert stand.counters.breaker_state["gpu-0"] == State.CLOSED


async def test_a_backend_out_of_reach_is_degraded_after_its_first_batch(clock: Clock) -> None:
    """Whoever waits for it meanwhile is told that there is no worker, and not that a deadline has passed."""
    away = True
    backend = Api(0.01, lambda entries: RemoteAbsent("no connection came about") if away else None)
    async with Stand(clock, backend) as stand:
        reply = await stand.ask("in vain", timeout=1.0)
        assert reply.failure is not None
        assert reply.failure.code == errors.NO_WORKERS
        [worker] = await stand.broker.workers()
        assert worker.status is WorkerStatus.DEGRADED
        assert worker.reason == "rests after failed batches; the last error: no connection came about"
        away = False
        assert (await stand.ask("good", timeout=10.0)).output == "GOOD"


class Broken(FakeBackend):
    """While `error` is set every batch fails, and the probe of something that no backend is known to raise."""

    error: Exception | None = None

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        items = await super().run(entries, timeout)
        if self.error is not None:
            raise self.error if entries[0].id == WARM_UP else BatchRaised("no")
        return items


@pytest.mark.parametrize("error", [RuntimeError("Session is closed"), KeyError(7)])
async def test_a_probe_that_fails_of_something_unforeseen_keeps_no_slot_out_for_good(
    error: Exception, clock: Clock
) -> None:
    backends = [Broken(0.01), Broken(0.01)]
    async with Stand(clock, *backends, max_batch=1, breaker=Breaker(5, 0.5)) as stand:
        for backend in backends:
            backend.error = error
        for number in range(8):
            await stand.ask(f"bad {number}", timeout=1.0)
        assert WorkerStatus.HEALTHY not in {worker.status for worker in await stand.broker.workers()}
        for backend in backends:
            backend.error = None
        await asyncio.sleep(31)
        assert (await stand.ask("good")).output == "GOOD"
        assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.HEALTHY}


async def test_a_slot_whose_turn_somebody_else_never_gives_back_is_not_healthy_and_comes_back(clock: Clock) -> None:
    breaker = Breaker(1, 0.5)
    async with Stand(clock, FakeBackend(0.1), breaker=breaker) as stand:
        breaker.failure(clock())
        assert breaker.allow(clock(), within=20.0)  # A probe that is never heard of again.
        refused = await stand.ask("meanwhile")
        assert codes([refused]) == [errors.NO_WORKERS]
        assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.DEGRADED}
        await asyncio.sleep(20)
        assert (await stand.ask("later")).output == "LATER"


async def test_slots_of_one_api_rest_together_as_long_as_it_asks(clock: Clock) -> None:
    breaker, begun = Breaker(5, 0.5), clock()

    def too_many(entries: Sequence[Entry]) -> BackendError | None:
        if clock() > begun + 50.0:
            return None
        breaker.rest(clock(), 60.0)
        return RemoteError("HTTP 429; it asks for 60 s of rest")

    backends = [FakeBackend(0.05, too_many) for _ in range(4)]
    async with Stand(clock, *backends, max_batch=4, breaker=breaker) as stand:
        asked = []
        for number in range(200):
            asked.append(stand.asking(f"t{number}"))
            await asyncio.sleep(0.02)
        assert set(codes(await asyncio.gather(*asked))) == {errors.NO_WORKERS}
        assert sum(len(backend.batches) for backend in backends) <= 4, "what had left when the API asked"
        reasons = {worker.reason for worker in await stand.broker.workers()}
        assert all("as it was asked to" in reason for reason in reasons)
        assert any(reason.endswith("; the last error: HTTP 429; it asks for 60 s of rest") for reason in reasons)
        await asyncio.sleep(60.0)
        assert (await stand.ask("well again")).output == "WELL AGAIN"


async def test_bad_inputs_in_a_row_do_not_take_the_service_from_others(clock: Clock) -> None:
    async with Stand(clock, FakeBackend(0.01, poison), max_batch=1) as stand:
        for number in range(30):
            assert codes([await stand.ask(f"poison {number}")]) == [errors.REJECTED_BY_MODEL]
            assert {worker.status for worker in await stand.broker.workers()} == {WorkerStatus.HEALTHY}
        before = clock()
        assert (await stand.ask("innocent")).output == "INNOCENT"
        assert clock() - before < 0.1
        assert stand.backends[0].starts == 1


async def test_a_client_is_not_told_what_only_operators_may_read(clock: Clock) -> None:
    def script(entries: Sequence[Entry]) -> BackendError | None:
        crash = any(entry.input == "bad" for entry in entries)
        return WorkerCrashed("it crashed; its last words: of another client", "it crashed") if crash else None

    async with Stand(clock, FakeBackend(0.05, script)) as stand:
        reply = await stand.ask("bad")
        assert reply.failure is not None
        assert (reply.failure.code, reply.failure.message) == (errors.REJECTED_BY_MODEL, "it crashed")
        [letter] = await stand.dead.list()
        assert letter.error == "it crashed; its last words: of another client"


async def test_when_the_retry_budget_is_spent_nobody_is_told_of_a_batch_mate(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(RetryBudget, "for_batches", lambda largest: RetryBudget(ratio=0.0, reserve=0.0, trickle=0.0))
    backend = FakeBackend(0.01, lambda entries: WorkerCrashed("it died of 'a secret'"))
    async with Stand(clock, backend, max_batch=2) as stand:
        for reply in await asyncio.gather(stand.ask("a secret"), stand.ask("another")):
            assert reply.failure is not None
            assert reply.failure.code == errors.BACKEND_ERROR
            assert "budget is spent" in reply.failure.message
            assert "secret" not in reply.failure.message


async def test_a_fault_inside_is_told_to_operators_alone(clock: Clock) -> None:
    class Faulty(FakeBackend):
        async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
            raise OSError(28, "No space left on device", "/srv/model")

    async with Stand(clock, Faulty()) as stand:
        failure = (await stand.ask("x")).failure
        assert failure is not None
        assert failure.message == "the worker broke"
        [letter] = await stand.dead.list(10)
        assert "No space left" in letter.error
