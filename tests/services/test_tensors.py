"""Tensors between a real gateway, broker and worker, on virtual time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import pytest

from headway import errors
from headway.core.tensors import Tensor, TensorHead, join_elements, pack
from headway.model import Tensors, TensorSpec, Value, ValueKind, WorkerInfo, WorkerStatus
from tests.services.stand import Stand, codes, served
from tests.services.test_input_policy import JUDGED, UNSEEN, WORDS, ask, ask_many, policed
from tests.virtual_time import Clock

NUMBERS, TEXTS = TensorSpec("x", "FP32", (2,)), TensorSpec("t", "BYTES", (-1,))


def learn(stand: Stand, *inputs: TensorSpec) -> None:
    worker = WorkerInfo(
        worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, takes=ValueKind.TENSORS.value, inputs=inputs
    )
    stand.gateway.served.learn([worker])


def numbers(*row: float, rows: int = 1, single: bool = False) -> Tensors:
    data = struct.pack(f"<{len(row)}f", *row) * rows
    return pack([Tensor(TensorHead("x", "FP32", (rows, len(row))), data)], single=single)


def texts(*elements: bytes) -> Tensors:
    return pack([Tensor(TensorHead("t", "BYTES", (1, len(elements))), join_elements(elements))], single=True)


def ran(stand: Stand) -> int:
    return sum(map(len, stand.backends[0].batches))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a text", "the data of the input `x` are `str`"),
        (numbers(1, 2, 3), "the input `x` is FP32 of shape [1, 3]; the model takes `x`, FP32 of shape [-1, 2]"),
        (texts(b"a"), "is BYTES of shape [1, 1]; the model takes `x`"),
        (b"[1]", "shape [1, 1]; the model takes"),
    ],
)
async def test_what_a_model_does_not_take_is_refused_whatever_door_it_came_by(
    clock: Clock, value: Value, says: str
) -> None:
    async with served(clock) as stand:
        learn(stand, NUMBERS)
        reply = await ask(stand, value)
        assert reply.failure is not None
        assert (reply.failure.code, says in reply.failure.message) == (errors.BAD_REQUEST, True), reply.failure.message
        assert ran(stand) == 0


async def test_json_that_stands_for_a_row_is_let_in(clock: Clock) -> None:
    async with served(clock) as stand:
        learn(stand, NUMBERS)
        assert codes([await ask(stand, b"[1,2]")]) == ["ok"]


async def test_more_rows_than_a_batch_holds_are_refused(clock: Clock) -> None:
    async with served(clock) as stand:
        learn(stand, NUMBERS)
        most = stand.gateway.settings.max_batch_size
        first, second = [await ask(stand, numbers(1, 2, rows=rows)) for rows in (most, most + 1)]
        assert codes([first, second]) == ["ok", errors.PAYLOAD_TOO_LARGE]
        assert second.failure is not None
        assert f"{most + 1} rows; at most {most}" in second.failure.message


async def test_equal_rows_run_once_and_one_row_is_not_an_array_of_one(clock: Clock) -> None:
    async with served(clock, collapse=True) as stand:
        learn(stand, NUMBERS)
        asked = [numbers(1, 2), numbers(1, 2), numbers(1, 2, single=True), numbers(1, 3), numbers(1, 2, rows=2)]
        replies = await asyncio.gather(*(ask(stand, value) for value in asked))
        assert [reply.output for reply in replies] == asked
        assert ran(stand) == 4
        assert [reply.output for reply in await ask_many(stand, asked)] == asked
        assert ran(stand) == 8


async def test_the_input_policy_looks_at_texts_in_tensors_and_at_no_number(clock: Clock) -> None:
    async with policed(clock, WORDS, UNSEEN) as (stand, _):
        learn(stand, TEXTS)
        assert codes([await ask(stand, texts(b"good", b"an evil one"))]) == [errors.REJECTED_BY_POLICY]
        reply = await ask(stand, texts("o\u200bk".encode(), b"\xff evil"))
        assert reply.output == texts(b"ok", b"\xff evil")
        learn(stand, NUMBERS)
        value = pack([Tensor(TensorHead("x", "FP32", (1, 2)), b"evilevil")])
        assert (await ask(stand, value)).output == value


async def test_a_judge_gets_the_texts_of_tensors_and_is_not_asked_of_numbers(clock: Clock) -> None:
    def judged() -> Sequence[object]:
        return [text for batch in functions.by_rule["judged"].batches for text in batch]

    async with policed(clock, JUDGED) as (stand, functions):
        learn(stand, TEXTS)
        assert codes([await ask(stand, texts(b"one", b"two"))]) == ["ok"]
        assert judged() == ["one\ntwo"]
        learn(stand, NUMBERS)
        assert codes([await ask(stand, numbers(1, 2))]) == ["ok"]
        assert judged() == ["one\ntwo"]
