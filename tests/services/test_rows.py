"""Tensors and requests with several rows, from the gateway to the slot: each row counts as one input."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from headway import errors
from headway.config import Settings
from headway.core.tensors import Tensor, TensorHead, pack
from headway.gateway.pending import FutureSink
from headway.gateway.served_models import ServedModels
from headway.model import (
    Limit,
    Octets,
    Principal,
    Reply,
    RequestOptions,
    RowsTogether,
    Signature,
    Tensors,
    TensorSpec,
    Value,
    ValueKind,
    WeightLine,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.request_id import new_id
from tests.contracts.brokers import tensors
from tests.services.calls import failure_of, several
from tests.services.fake_backend import FakeBackend
from tests.services.requests import request
from tests.services.stand import Stand
from tests.virtual_time import Clock

PLAIN = RequestOptions(4.0, 1)
B = 8


class TensorsBackend(FakeBackend):
    """A backend whose target takes tensors and returns them."""

    @property
    def signature(self) -> Signature:
        return Signature(ValueKind.TENSORS, ValueKind.TENSORS)


class OfOneShape(TensorsBackend):
    """A tensor backend that takes rows of one shape per call."""

    @property
    def signature(self) -> Signature:
        specs = (TensorSpec("x", "UINT8", (-1,)),)
        return Signature(ValueKind.TENSORS, ValueKind.TENSORS, inputs=specs, together=RowsTogether.SHAPE)


class RowsStand(Stand):
    """A stand whose gateway already knows its workers."""

    async def __aenter__(self) -> RowsStand:
        await super().__aenter__()
        self.gateway.served.learn(await self.broker.workers())
        self.gateway.learn()
        return self

    async def infer(self, *rows: int, caller: Principal | None = None) -> list[Reply]:
        """Send requests with these numbers of rows at the same time, and return their replies."""
        asked = [self.send(tensors(count, number.to_bytes(2, "big")), caller) for number, count in enumerate(rows)]
        return [reply for [reply] in await asyncio.gather(*(one.replies for one in asked))]

    def send(self, value: Value, caller: Principal | None = None) -> FutureSink:
        sink = FutureSink()
        caller = caller or Principal("u", "t", 1)
        lane = self.gateway.lane(caller, PLAIN, "m")
        if lane.rows and self.gateway.served["m"].takes_unweighed(value):
            self.gateway.enter(sink, lane, new_id(), value, b"")
            return sink
        self.gateway.submit(sink, request(value, caller))
        return sink

    async def infer_list(self, inputs: Sequence[Value], caller: Principal) -> Sequence[Reply]:
        return await several(self.gateway, inputs, caller)[1]


def heads(batch: Sequence[str]) -> int:
    """Return the number of rows in a batch, given its inputs as shown in logs."""
    return sum(int(shown.rpartition("[")[2].partition(",")[0]) for shown in batch)


def models_of(takes: ValueKind, **settings: object) -> ServedModels:
    """Return the models of a gateway that already knows what they take."""
    made = ServedModels(["m"], Settings(model="m", max_batch_size=B, **settings))  # type: ignore[arg-type]
    line = WeightLine(0.0, 10.0)
    made.learn([WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, takes=takes.value, weight=line)])
    return made


async def test_requests_of_one_row_take_a_lane_and_ride_with_those_of_several(clock: Clock) -> None:
    backend = TensorsBackend(0.1)
    async with RowsStand(clock, backend) as stand:
        caller = Principal("u", "t", 1)
        assert stand.gateway.lane(caller, PLAIN, "m").rows
        assert not stand.gateway.lane(caller, PLAIN, "m").open
        for asked in ([1] * B, [1, 3, 1, 1, 2], [2, 1, 5]):
            replies = await stand.infer(*asked)
            for number, (count, reply) in enumerate(zip(asked, replies, strict=True)):
                assert reply.output == tensors(count, number.to_bytes(2, "big"))
        assert sum(size * total.count for (_, size), total in stand.counters.gateway.runs.items()) == 3 * B
        assert stand.counters.gateway.requests["m", "paid", "ok"] == B + 5 + 3
        assert stand.gateway.pending == 0


def test_one_row_that_the_model_takes_need_not_be_weighed() -> None:
    models = models_of(ValueKind.TENSORS)
    known = models["m"]
    weighed_or_shared = [
        models_of(ValueKind.TENSORS, max_batch_weight=80)["m"],
        models_of(ValueKind.TENSORS, cache=True)["m"],
    ]
    assert not any(one.takes_rows for one in weighed_or_shared)
    one, spec = tensors(1), TensorSpec("x", "UINT8", (3,))
    assert (known.takes_rows, known.is_plain) == (True, False)
    assert [known.takes_unweighed(value) for value in (one, one, tensors(2), "a", Octets(one.content), Tensors(b"x"))] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    other = pack([Tensor(TensorHead("x", "FP32", (1, 2)), bytes(8))])
    worker = WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, takes="tensors", inputs=(spec,))
    models.learn([worker])
    assert [known.takes_unweighed(value) for value in (one, other)] == [True, False]
    free = msgspec.structs.replace(worker, inputs=(TensorSpec("x", "UINT8", (-1,)),), together=RowsTogether.SHAPE)
    models.learn([free])
    assert not known.takes_unweighed(one)
    models.learn([msgspec.structs.replace(worker, takes="text", inputs=())])
    assert (known.takes_rows, known.is_plain) == (False, True)


async def test_a_tenant_of_many_shapes_has_a_batch_for_each_and_its_neighbour_is_answered(clock: Clock) -> None:
    backend = OfOneShape(0.06)
    async with RowsStand(clock, backend) as stand:
        since, sizes = clock(), range(20, 50)
        values = [pack([Tensor(TensorHead("x", "UINT8", (1, size)), bytes(size))]) for size in sizes]
        flood = [stand.send(value, Principal("u", "many shapes", 1)) for value in values]
        replies = await stand.infer_list([tensors(1)] * 5, Principal("u", "neighbour", 1))
        assert clock() - since < 0.25
        assert all(reply.output is not None for reply in replies)
        answered = [await one.replies for one in flood]
        assert all(reply.output is not None for [reply] in answered)
        shapes = [{shown.rpartition(",")[2] for shown in batch} for batch in backend.batches]
        assert len(backend.batches) == 31
        assert all(len(of_batch) == 1 for of_batch in shapes)


async def test_where_the_settings_bound_the_weight_that_stays(clock: Clock) -> None:
    async with RowsStand(clock, TensorsBackend(0.1), max_batch_weight=80) as stand:
        [batcher] = stand.pool.batchers
        assert (batcher.slot.max_weight, batcher.claims.slot.max_weight) == (80, 80)
        await stand.infer(4, 4, 4)
        assert [heads(batch) for batch in stand.backends[0].batches] == [8, 4]


def test_an_input_weighs_its_rows_or_what_a_function_of_the_target_counts_if_that_is_more() -> None:
    value = tensors(4)
    assert models_of(ValueKind.TENSORS)["m"].weigh(value) == 4
    assert models_of(ValueKind.TENSORS, max_batch_weight=80)["m"].weigh(value) == 40
    assert models_of(ValueKind.TENSORS, max_batch_weight=80, weight="cost")["m"].weigh(value) == 10 * len(value)
    assert models_of(ValueKind.TENSORS, max_batch_weight=8000, weight="cost")["m"].weigh(value) == 4000


def test_while_workers_of_texts_and_of_tensors_serve_one_model_both_kinds_are_let_in() -> None:
    """During a rollout to another kind, the gateway lets in whatever any worker could answer. Workers check it."""
    models = models_of(ValueKind.TENSORS)
    workers = [
        WorkerInfo(worker_id=kind.value, model="m", status=WorkerStatus.HEALTHY, takes=kind.value)
        for kind in (ValueKind.TENSORS, ValueKind.JSON)
    ]
    models.learn(workers)
    known = models["m"]
    assert (known.takes, known.weigh(tensors(4)), known.weigh(b"[1]")) == (None, 4, 1)
    assert models.check("m", b"[1]") is None
    models.learn(workers[:1])
    assert models["m"].takes is ValueKind.TENSORS


def test_other_settings_of_a_model_leave_its_rows_counted() -> None:
    models = models_of(ValueKind.TENSORS)
    models.serve({"m": Settings(model="m", max_batch_size=4)})
    assert models["m"].weigh(tensors(9)) == 4


class TestLimits:
    LIMITED = Principal("u", "t", 1, (Limit("user:u", "user", 60.0, 8.0),))

    async def test_a_request_of_rows_counts_as_a_list_of_them(self, clock: Clock) -> None:
        """With a burst of 8, three requests of 3 rows are one row too many, just like three lists of 3 inputs."""
        async with RowsStand(clock, TensorsBackend(0.1)) as stand:
            by_rows = await stand.infer(3, 3, 3, caller=self.LIMITED)
        async with RowsStand(clock, TensorsBackend(0.1)) as stand:
            lists = [await stand.infer_list([tensors(1)] * 3, self.LIMITED) for _ in range(3)]
        for *let_in, refused in (by_rows, [replies[0] for replies in lists]):
            assert all(reply.failure is None for reply in let_in)
            failure = failure_of(refused)
            assert (failure.code, failure.reason) == (errors.RATE_LIMITED, "rate")
            assert "3 inputs count as 3 requests" in failure.message

    async def test_a_list_of_several_rows_each_counts_all_of_them(self, clock: Clock) -> None:
        async with RowsStand(clock, TensorsBackend(0.1)) as stand:
            assert all(reply.failure is None for reply in await stand.infer_list([tensors(4)] * 2, self.LIMITED))
            [refused] = await stand.infer(1, caller=self.LIMITED)
            assert refused.failure is not None

    @pytest.mark.parametrize("listed", [False, True])
    async def test_more_rows_than_the_limit_are_refused_for_good(self, listed: bool, clock: Clock) -> None:
        limited = Principal("u", "t", 1, (Limit("user:u", "user", 60.0, 4.0),))
        async with RowsStand(clock, TensorsBackend(0.1)) as stand:
            value = tensors(5)
            [reply] = await (stand.infer_list([value], limited) if listed else stand.send(value, limited).replies)
            assert (failure_of(reply).code, failure_of(reply).reason) == (errors.PAYLOAD_TOO_LARGE, "burst")
            assert not stand.backends[0].batches
            assert stand.gateway.limiter.debts, "it counts as one wrong request"
            await stand.infer(*[1] * 5, caller=limited)
            [reply] = await (stand.infer_list([value], limited) if listed else stand.send(value, limited).replies)
            assert failure_of(reply).code == errors.PAYLOAD_TOO_LARGE, "also over the limit"

    async def test_one_row_counts_as_one(self, clock: Clock) -> None:
        async with RowsStand(clock, TensorsBackend(0.1)) as stand:
            replies = await stand.infer(*[1] * 9, caller=self.LIMITED)
            assert [reply.failure is None for reply in replies] == [True] * 8 + [False]
