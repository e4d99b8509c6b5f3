"""Several models of one process: each with a queue, workers, rules and a throttle of its own."""

from __future__ import annotations

import asyncio

import pytest

from headway import errors
from headway.app.brokers import queue_limits
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.config.models import ModelSettings
from headway.fleet.reaper import reap_on
from headway.gateway.gateway import Gateway
from headway.model import Failure, InferenceRequest, ModelReport, Principal, Reply, RequestOptions, Slot
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.pool import WorkerPool, WorkerPools
from tests.services.batchers import make_batcher
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.virtual_time import Clock

BATCH = 0.1
"""Seconds of a batch of either model."""


def model(name: str, **values: object) -> ModelSettings:
    return ModelSettings(name, values=tuple(values.items()))


class TwoModels:
    """A gateway and a slot for each of two models."""

    def __init__(self, clock: Clock, *models: ModelSettings, **settings: object) -> None:
        chosen = models or (model("a"), model("b"))
        self.settings = Settings(models=chosen, max_batch_size=8, policy="window", max_wait_ms=0, **settings)  # type: ignore[arg-type]
        self.counters, self.clock = Counters(), clock
        limits = {name: queue_limits(one) for name, one in self.settings.served.items()}
        self.broker = MemoryBroker(limits, DeadLetterBox(), self.counters.broker, clock, lambda: 0.5)
        self.gateway = Gateway(self.settings, [*limits], self.broker, self.counters.gateway, clock, rng=lambda: 0.5)
        self.backends = {name: FakeBackend(BATCH) for name in limits}
        slots = set[str]()
        pools = {name: WorkerPool(lambda index, name=name: self._batcher(name), 1, 1, slots) for name in limits}  # type: ignore[misc]
        self.pools = WorkerPools(pools, slots)
        self._supervisor = Supervisor()

    def _batcher(self, name: str) -> Batcher:
        own = self.settings.served[name]
        slot = Slot(f"{name}/gpu-0", name, own.max_batch_size, 0, ModelReport(own.model_version))
        return make_batcher(slot, lambda: self.backends[name], self.broker, self.counters.worker, self.clock)

    async def __aenter__(self) -> TwoModels:
        await self.pools.start()
        self.pools.run(self._supervisor)
        self.gateway.start(self._supervisor)
        self._supervisor.start("reaper", lambda: reap_on(self.broker))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._supervisor.stop()
        await self.pools.stop()

    async def ask(self, model: str, text: str = "x", caller: Principal = ANYBODY, **options: object) -> Reply:
        asked = RequestOptions(4.0, **options)  # type: ignore[arg-type]
        return await self.gateway.ask(InferenceRequest(caller, new_id(), asked, model, text, b""))

    async def latency(self, model: str) -> float:
        begun = self.clock()
        reply = await self.ask(model)
        assert reply.failure is None
        return self.clock() - begun


def failure(reply: Reply) -> Failure:
    assert reply.failure is not None
    return reply.failure


async def test_each_model_answers_with_its_own_workers_and_version(clock: Clock) -> None:
    async with TwoModels(clock, model("a", model_version="7"), model("b", model_version="8")) as two:
        assert two.pools.slots == {"a/gpu-0", "b/gpu-0"}
        for name, version in (("a", "7"), ("b", "8")):
            reply = await two.ask(name, name)
            assert reply.ran is not None
            assert (reply.output, reply.ran.worker, reply.ran.version) == (name.upper(), f"{name}/gpu-0", version)
        assert [two.backends[name].batches[-1] for name in "ab"] == [["a"], ["b"]]


async def test_a_flood_of_one_model_leaves_the_other_its_calm_latency(clock: Clock) -> None:
    async with TwoModels(clock) as two:
        calm = [await two.latency("b") for _ in range(10)]
        flood = [asyncio.ensure_future(two.ask("a")) for _ in range(200)]
        flooded = [await two.latency("b") for _ in range(10)]
        assert max(flooded) <= max(calm) + BATCH
        replies = await asyncio.gather(*flood)
        assert any(reply.failure is None for reply in replies)


async def test_largest_batch_and_deadlines_are_those_of_the_model(clock: Clock) -> None:
    quick = model("b", max_batch_size=2, request_timeout_ms=150.0, queue_timeout_ms=150.0)
    async with TwoModels(clock, model("a"), quick) as two:
        await asyncio.gather(*(two.ask("a", str(number)) for number in range(9)))
        assert max(map(len, two.backends["a"].batches)) == 8
        begun = clock()
        replies = await asyncio.gather(*(two.ask("b", str(number)) for number in range(9)))
        assert clock() - begun <= 0.2, "nobody waits longer than this model allows"
        assert max(map(len, two.backends["b"].batches)) <= 2
        assert {failure(reply).code for reply in replies if reply.failure} <= {
            errors.DEADLINE_EXCEEDED, errors.SERVICE_OVERLOADED, errors.SHED,
        }  # fmt: skip


async def test_only_the_model_with_a_cache_keeps_outputs(clock: Clock) -> None:
    async with TwoModels(clock, model("a", cache=True), model("b")) as two:
        for name, runs in (("a", 1), ("b", 2)):
            for _ in range(2):
                assert (await two.ask(name, "same")).output == "SAME"
            assert len(two.backends[name].batches) == runs


async def test_a_model_whose_workers_are_gone_keeps_no_other_from_answering(clock: Clock) -> None:
    async with TwoModels(clock) as two:
        await two.pools.of_models["a"].wind_down()
        gone = asyncio.ensure_future(two.ask("a"))
        assert (await two.ask("b")).output == "X"
        assert failure(await gone).code in (errors.NO_WORKERS, errors.SERVICE_OVERLOADED)


@pytest.mark.parametrize(
    ("only", "asked", "code", "named"),
    [
        (frozenset[str](), "", errors.BAD_REQUEST, "name one of: a, b"),
        (frozenset("b"), "", errors.BAD_REQUEST, "name one of: b"),
        (frozenset[str](), "c", errors.NOT_FOUND, "there is: a, b"),
        (frozenset("b"), "c", errors.FORBIDDEN, "only for: b"),
        (frozenset("b"), "a", errors.FORBIDDEN, "only for: b"),
        (
            frozenset("c"),
            "",
            errors.FORBIDDEN,
            "no model that this credential is for is served here; it is only for: c",
        ),
        (frozenset("c"), "c", errors.NOT_FOUND, "there is: none for you"),
    ],
)
async def test_a_request_for_no_model_or_a_foreign_one_names_those_it_may_ask(
    only: frozenset[str], asked: str, code: str, named: str, clock: Clock
) -> None:
    async with TwoModels(clock) as two:
        told = failure(await two.ask(asked, caller=Principal("u", "t", 0, models=only)))
        assert told.code == code
        assert told.message.endswith(named)
        assert "a" not in told.message.rpartition(":")[2] or not only


async def test_each_model_has_a_throttle_of_its_own(clock: Clock) -> None:
    async with TwoModels(clock) as two:
        lowest = len(two.settings.tier_names) - 1
        two.gateway.limiter.throttles["a"].set_rate(0.0, clock())
        refused, taken = await asyncio.gather(*(two.ask(name, tier=lowest) for name in "ab"))
        assert (failure(refused).code, taken.output) == (errors.SHED, "X")
