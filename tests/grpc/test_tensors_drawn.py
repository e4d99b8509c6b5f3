"""Random tensors through ModelInfer, typed and raw, byte for byte, and damaged messages on an open port."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.tensors import unpack
from headway.doors.exchange import Outcome
from headway.errors import UNFORESEEN
from headway.gateway.served_models import ServedModels
from headway.model import RequestOptions, Tensors, TensorSpec, ValueKind
from headway.oip.grpc.infer_messages import infer_reader
from headway.oip.tensors import CONTENTS
from tests.grpc.stand import INFER, PREDICT, Port, served
from tests.grpc.test_open_inference import STREAM, Request, answered, request, streamed
from tests.grpc.test_tensors import model, told
from tests.oip.arrays import Drawn, several

Status = grpc.StatusCode
READ = infer_reader(Settings()).at_once


def message(drawn: list[Drawn], raw: bool, **members: Any) -> bytes:
    """Message of a request with these inputs, whose data are raw, or typed where they can be."""
    asked = Request(model_name="default", **members)
    raw = raw or any(one.tensor.head.datatype not in CONTENTS for one in drawn)
    for one in drawn:
        head = one.tensor.head
        tensor = asked.inputs.add(name=head.name, datatype=head.datatype, shape=head.shape)
        if raw:
            asked.raw_input_contents.append(bytes(one.tensor.data))
        else:
            elements = [each.encode() for each in one.flat] if head.datatype == "BYTES" else one.flat
            getattr(tensor.contents, CONTENTS[head.datatype][0]).extend(elements)
    return bytes(asked.SerializeToString())


def known_by(drawn: list[Drawn], takes: ValueKind | None, *, free: bool) -> ServedModels:
    """Models one of which takes and gives tensors such as these, or of which nothing is known. `free`: the sizes of its axes are."""
    known, heads = ServedModels(["default"], Settings()), [one.tensor.head for one in drawn]
    if takes is not None:
        specs = tuple(TensorSpec(one.name, one.datatype, tuple(-1 if free else size for size in one.shape[1:])) for one in heads)  # fmt: skip
        known.learn(model(inputs=specs, outputs=specs))
    return known


@given(several(), st.booleans(), st.data())
def test_any_tensors_go_in_and_out_byte_for_byte(drawn: list[Drawn], raw: bool, data: st.DataObject) -> None:
    takes = data.draw(st.sampled_from([ValueKind.TENSORS, None]))
    order = data.draw(st.permutations(drawn))
    wanted = order[: data.draw(st.integers(0, len(order)))]
    body = message(drawn, raw, outputs=[{"name": one.tensor.head.name} for one in wanted])
    if data.draw(st.booleans()):  # As a large one is read; the parameter is for the target.
        pad = Request(model_name="default")
        pad.parameters["pad"].string_param = "x" * (1 << 14)
        body += pad.SerializeToString()
    exchange = READ(body, RequestOptions(1.0), known_by(drawn, takes, free=data.draw(st.booleans())))
    if not isinstance(exchange.input, Tensors):
        assert takes is None and len(drawn) == 1 and drawn[0].tensor.head.datatype == "BYTES"
        return
    assert [(one.head, bytes(one.data)) for one in unpack(exchange.input)] == [one.tensor for one in drawn]
    copies = data.draw(st.integers(1, 3))
    _, answer = exchange.write(Outcome("", [exchange.input] * copies, 0.0, "1", [None] * copies))
    assert isinstance(answer, bytes)
    heads = {one.tensor.head.name: one.tensor for one in wanted or drawn}
    assert list(told(answered(answer)).items()) == [
        (name, (head.datatype, (copies * head.shape[0], *head.shape[1:]), bytes(content) * copies))
        for name, (head, content) in heads.items()
    ]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[Drawn], bytes]:
    """Tensors, and a message with them that is damaged in some places."""
    drawn = draw(several())
    body = bytearray(message(drawn, draw(st.booleans()), outputs=[{"name": drawn[0].tensor.head.name}]))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 3))] = draw(PIECES)
    return drawn, bytes(body)


PIECES = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"FP16", b"JSON", b"BOOL", b"\xff" * 9 + b"\1", b"\x80" * 11, b"\x0b", b"\x0c", b"\x3a\0", b"\x2a\0", b"\0" * 9]),
)  # fmt: skip
"""What damages a message."""
REFUSED = {Status.OK, Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.RESOURCE_EXHAUSTED}
"""Statuses that a damaged message may have."""


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(damaged(), min_size=1, max_size=30))
def test_damaged_messages_are_refused_or_answered_and_their_connection_goes_on(
    drawn: list[tuple[list[Drawn], bytes]],
) -> None:
    async def main(port: Port) -> None:
        client = port.client()
        learn = port.stand.real.served.learn
        specs = tuple(
            TensorSpec(one.tensor.head.name, one.tensor.head.datatype, one.tensor.head.shape[1:]) for one in drawn[0][0]
        )
        for inputs in ((), specs):
            learn(model(inputs=inputs))
            calls = [client.call(way, body) for _, body in drawn for way in (INFER, PREDICT)]
            assert {await call.code() for call in calls} <= REFUSED
            stream = client.stream(STREAM)
            for _, body in drawn:
                await stream.write(body)
            await stream.done_writing()
            for _ in drawn:
                answer = streamed(await asyncio.wait_for(stream.read(), 10))
                assert answer.error_message != UNFORESEEN
            assert await stream.code() is Status.OK
        learn(model("text", "text"))
        await client.ask(INFER, request("a").SerializeToString())

    served(main, whole=True)
