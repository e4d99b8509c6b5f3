"""Several models in one process: each with its own queue, workers and rules, and models that take turns on its GPUs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from headway import errors
from headway.app.devices import Devices
from headway.app.model_plans import ModelPlan
from headway.app.scaling import scalable
from headway.config.target import ModelSettings, parse_target
from headway.model import ModelReport, Principal, Slot
from headway.worker.batcher import Batcher
from headway.worker.pool import Places, WorkerPool, WorkerPools
from tests.services.calls import failure_of
from tests.services.fake_backend import FakeBackend
from tests.services.site import Site
from tests.virtual_time import Clock

BATCH = 0.1


def model(name: str, **values: object) -> ModelSettings:
    return ModelSettings(name, values=tuple(values.items()))


class TwoModels(Site):
    """A gateway and a slot for each of two models. With `gpus`, the models take turns on them."""

    def __init__(self, clock: Clock, *models: ModelSettings, gpus: int = 0, **settings: Any) -> None:
        super().__init__(clock, *(models or (model("a"), model("b"))), **settings)
        self.backends = {name: FakeBackend(BATCH) for name in self.settings.served}
        self.slots, places = set[str](), Places(gpus) if gpus else None
        self.of_models = {
            name: WorkerPool(partial(self._batcher, name), 1, gpus or 1, self.slots, places) for name in self.backends
        }
        self.pools = [WorkerPools(self.of_models, self.slots)]

    def _batcher(self, name: str, index: int) -> Batcher:
        own = self.settings.served[name]
        slot = Slot(f"{name}/gpu-{index}", name, own.max_batch_size, 0, ModelReport(own.model_version))
        return self.batcher(slot, lambda: self.backends[name])


async def test_each_model_answers_with_its_own_workers_version_and_cache(clock: Clock) -> None:
    async with TwoModels(clock, model("a", model_version="7", cache=True), model("b", model_version="8")) as two:
        assert two.slots == {"a/gpu-0", "b/gpu-0"}
        for name, version, runs in (("a", "7", [["a"]]), ("b", "8", [["b"], ["b"]])):
            for _ in range(2):
                reply = await two.ask(name, name)
            assert reply.ran is not None
            assert (reply.output, reply.ran.worker, reply.ran.version) == (name.upper(), f"{name}/gpu-0", version)
            assert two.backends[name].batches == runs


async def test_largest_batch_and_deadlines_are_those_of_the_model(clock: Clock) -> None:
    quick = model("b", max_batch_size=2, request_timeout_ms=150.0, queue_timeout_ms=150.0)
    async with TwoModels(clock, model("a"), quick) as two:
        await asyncio.gather(*(two.ask("a", str(number)) for number in range(9)))
        assert max(map(len, two.backends["a"].batches)) == 8
        begun = clock()
        replies = await asyncio.gather(*(two.ask("b", str(number)) for number in range(9)))
        assert clock() - begun <= 0.2, "nobody waits longer than this model allows"
        assert max(map(len, two.backends["b"].batches)) <= 2
        assert {failure_of(reply).code for reply in replies if reply.failure} <= {
            errors.DEADLINE_EXCEEDED, errors.SERVICE_OVERLOADED, errors.SHED,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("only", "asked", "code", "named"),
    [
        (frozenset[str](), "", errors.BAD_REQUEST, "name one of: a, b"),
        (frozenset("b"), "", errors.BAD_REQUEST, "name one of: b"),
        (frozenset[str](), "c", errors.NOT_FOUND, "available: a, b"),
        (frozenset("b"), "c", errors.FORBIDDEN, "only for: b"),
        (frozenset("b"), "a", errors.FORBIDDEN, "only for: b"),
        (frozenset("c"), "", errors.FORBIDDEN, "is for is served here; it is only for: c"),
        (frozenset("c"), "c", errors.NOT_FOUND, "available: none for you"),
    ],
)
async def test_a_request_for_no_model_or_a_foreign_one_names_those_it_may_ask(
    only: frozenset[str], asked: str, code: str, named: str, clock: Clock
) -> None:
    async with TwoModels(clock) as two:
        told = failure_of(await two.ask(asked, caller=Principal("u", "t", 0, models=only)))
        assert told.code == code
        assert told.message.endswith(named)
        assert "a" not in told.message.rpartition(":")[2] or not only


async def test_each_model_has_a_throttle_of_its_own(clock: Clock) -> None:
    async with TwoModels(clock) as two:
        lowest = len(two.settings.tier_names) - 1
        two.gateway.limiter.throttles["a"].set_rate(0.0, clock())
        refused, taken = await asyncio.gather(*(two.ask(name, tier=lowest) for name in "ab"))
        assert (failure_of(refused).code, taken.output) == (errors.SHED, "X")


async def test_a_model_gets_the_gpu_that_another_gives_back_after_its_batch(clock: Clock) -> None:
    async with TwoModels(clock, gpus=2) as two:
        a, b = two.of_models.values()
        devices = Devices(("0", "1"), 2, shared=True)
        plans = {name: ModelPlan(own, parse_target("m:f"), devices) for name, own in two.settings.served.items()}
        running = asyncio.ensure_future(two.ask("a"))
        await asyncio.sleep(BATCH / 2)
        await b.resize(2)
        assert two.slots == {"a/gpu-0", "b/gpu-1"}, "none is free"
        assert scalable(plans, two.of_models) == {"a": (1, 0), "b": (1, 2)}, "a is to give its own up"
        await a.resize(0)
        assert (running.done(), two.slots) == (True, {"b/gpu-1", "b/gpu-0"})
        await a.resize(1)
        assert a.size == 0
        await b.resize(1)
        assert two.slots == {"a/gpu-0", "b/gpu-1"}
        assert (await two.ask("a")).output == "X"
