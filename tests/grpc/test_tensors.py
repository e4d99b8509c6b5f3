"""Tensors over gRPC: typed and raw contents, several inputs and outputs, streams, JSON strings and random tensors."""

import asyncio
import itertools
import json
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config import Settings
from headway.core.tensors import unpack
from headway.doors.exchange import Outcome
from headway.errors import UNFORESEEN
from headway.gateway.limiter import Limiter
from headway.gateway.served_models import ServedModels
from headway.grpc.call_stream import MessageTurns
from headway.model import RequestOptions, Tensors, TensorSpec, ValueKind
from headway.oip.grpc.infer_messages import infer_reader
from headway.oip.tensors import CONTENTS
from tests.grpc.stand import INFER, PREDICT, Port, on_port, predict, predicted, served
from tests.grpc.test_open_inference import BEARER, STREAM, Request, answered, request, streamed
from tests.http.stand import worker
from tests.http.test_tensors import arrays, tensors
from tests.oip.arrays import Drawn, several

Status = grpc.StatusCode
FOUR = TensorSpec("x", "FP32", (4,))
INTEGERS, HALVES = TensorSpec("x", "INT64", (-1,)), TensorSpec("x", "FP16", (2,))
BAD_REQUEST = Status.INVALID_ARGUMENT, "BAD_REQUEST"
NAMED = (TensorSpec("query", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,)), TensorSpec("texts", "BYTES"))


def asked(given: Mapping[str, tuple[str, Sequence[int], bytes]], **members: Any) -> Any:
    found = Request(model_name="default", **members)
    for name, (datatype, shape, data) in given.items():
        found.inputs.add(name=name, datatype=datatype, shape=shape)
        found.raw_input_contents.append(data)
    return found


def typed(datatype: str, shape: Sequence[int], **contents: Sequence[Any]) -> Any:
    """Return a request with one input whose data is in `contents`."""
    found = Request(model_name="default")
    found.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents)
    return found


def told(answer: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    assert len(answer.outputs) == len(answer.raw_output_contents)
    return {
        one.name: (one.datatype, tuple(one.shape), raw)
        for one, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


@pytest.mark.parametrize("count", [4, (1 << 18) + 1])
async def test_messages_that_differ_in_their_data_alone_are_each_read_and_answered(port: Port, count: int) -> None:
    """Everything but their data is cached. A large tensor that needs nothing after it isn't copied."""
    spec, client = TensorSpec("x", "UINT8", (-1,)), port.client()
    port.stand.learn("tensors", inputs=(spec,), outputs=(spec,))
    for first in (b"\1", b"\2", b"\3"):
        data = first.ljust(count, b"\4")
        answer = await client.ask(INFER, asked({"y": ("UINT8", [1, count], data)}).SerializeToString())
        assert told(answered(answer)) == {"x": ("UINT8", (1, count), data)}
        assert arrays(port.gateway.asked[-1].input) == {"x": ("UINT8", (1, count), data)}
    other = asked({"z": ("UINT8", [1, count], data)}).SerializeToString()  # As long as the earlier ones.
    assert told(answered(await client.ask(INFER, other))) == {"x": ("UINT8", (1, count), data)}
    port.stand.learn("tensors", inputs=(TensorSpec("x", "INT8", (-1,)),))
    assert (await client.fail(INFER, other)).status is Status.INVALID_ARGUMENT


async def test_what_is_remembered_of_a_message_keeps_its_id_parameters_and_outputs(port: Port) -> None:
    port.stand.learn("tensors", inputs=(FOUR,), outputs=(FOUR, TensorSpec("other", "INT8")))
    client = port.client()
    for number in range(3):
        data = bytes([number] * 16)
        given = asked({"x": ("FP32", [1, 4], data)}, id="7")
        given.outputs.add(name="x")
        given.parameters["heat"].int64_param = 5
        answer = answered(await client.ask(INFER, given.SerializeToString()))
        assert (answer.id, told(answer)) == ("7", {"x": ("FP32", (1, 4), data)})
        assert port.gateway.asked[-1].parameters == b'{"heat":5}'


def raw_four(*shape: int, datatype: str = "FP32", name: str = "x", data: bytes | None = None, **members: Any) -> Any:
    return asked({name: (datatype, shape, bytes(4 * 4) if data is None else data)}, **members)


def named(without: str = "", **changes: tuple[str, tuple[int, ...], bytes]) -> Any:
    good = {"query": ("FP32", (1, 2), bytes(8)), "ids": ("INT64", (1, 1), bytes(8)), "texts": ("BYTES", (1,), bytes(4))}
    return asked({name: one for name, one in (good | changes).items() if name != without})


def both_forms() -> Any:
    found = raw_four(1, 4)
    found.inputs[0].contents.fp32_contents.extend([0] * 4)
    return found


def without_last_raw() -> Any:
    found = named()
    del found.raw_input_contents[-1]
    return found


def in_shared_memory() -> Any:
    found = named()
    found.inputs[1].parameters["shared_memory_region"].string_param = "r"
    return found


def classified() -> Any:
    found = raw_four(1, 4, outputs=[{"name": "y"}])
    found.outputs[0].parameters["classification"].int64_param = 3
    return found


WRONG: dict[str, tuple[Any, Any, str]] = {
    "datatype": ((FOUR,), raw_four(1, 4, datatype="FP64"), "the model takes `x`, FP32 of shape [-1, 4]. Send FP32: in numpy use `.astype('float32')`"),
    "many axes": ((FOUR,), raw_four(*[1] * 50_000), "take 50017 bytes; the limit is 32768"),
    "too few bytes": ((FOUR,), raw_four(1, 4, data=b"\0"), "the input `x` has 1 bytes; FP32 of shape [1, 4] takes 16"),
    "no data": ((FOUR,), typed("FP32", [1, 4]), "`fp32_contents` of the input `x` has 0 elements; FP32 of shape [1, 4] takes 4"),
    "few elements": ((FOUR,), typed("FP32", [1, 4], fp32_contents=[1]), "of the input `x` has 1 elements; FP32 of shape [1, 4] takes 4"),
    "other contents": ((FOUR,), typed("FP32", [1, 4], fp64_contents=[1] * 4), "the input `x` has `fp64_contents`; expected `fp32_contents`"),
    "typed halves": ((HALVES,), typed("FP16", [1, 2], fp32_contents=[1, 2]), "`x` is FP16, for which the protocol does not define `contents`"),
    "both forms": ((FOUR,), both_forms(), "the input `x` has `contents`, but the request has `raw_input_contents`"),
    "range": (
        (TensorSpec("x", "UINT8"),), typed("UINT8", [2], uint_contents=[255, 256]),
        "element 1 of the input `x` is 256, which is out of the range of UINT8",
    ),
    "range of a later page": (
        (TensorSpec("x", "INT8", (-1,)),), typed("INT8", [1, 3000], int_contents=[*[1] * 2500, 128, *[1] * 499]),
        "element 2500 of the input `x` is 128, which is out of the range of INT8",
    ),
    "lower range": (
        (TensorSpec("x", "INT16"),), typed("INT16", [1], int_contents=[-40_000]),
        "element 0 of the input `x` is -40000, which is out of the range of INT16",
    ),
    "missing": (NAMED, named("ids"), "the input `ids` is missing; the model takes `query`"),
    "raw missing": (NAMED, without_last_raw(), "`raw_input_contents` has 2 members, but the request has 3 inputs"),
    "shared memory": (NAMED, in_shared_memory(), "shared memory is not supported"),
    "many inputs": (NAMED, Request(inputs=[{"name": "a"}] * 30_000), "the message has more than 1024 members, which would take long to decode"),
    "no output": ((FOUR,), raw_four(1, 4, outputs=[{"name": "z"}]), "there is no output `z`; the model returns `y`"),
    "many outputs": ((FOUR,), raw_four(1, 4, outputs=[{"name": "y"}] * 65), "the request lists 65 outputs; at most 64"),
    "classification": ((FOUR,), classified(), "classification is not supported"),
}  # fmt: skip
"""Specifications of a model, a request that is wrong for it, and what its client is told."""


@on_port(whole=True)
async def test_inputs_that_a_model_does_not_take_are_refused_before_anything_is_queued(port: Port) -> None:
    client = port.client()
    for name, (specs, wrong, says) in WRONG.items():
        port.stand.learn("tensors", inputs=specs, outputs=(TensorSpec("y", "FP32"),))
        refused = await client.fail(INFER, wrong.SerializeToString())
        assert (name, refused.status, refused.trailers["x-headway-error"]) == (name, *BAD_REQUEST)
        assert says in refused.details
    assert port.stand.runs == []


@on_port(max_body_bytes=1 << 16)
async def test_numbers_that_take_more_bytes_than_a_message_may_are_refused(port: Port) -> None:
    port.stand.learn("tensors", inputs=(INTEGERS,))
    refused = await port.client().fail(INFER, typed("INT64", [1, 9000], int64_contents=[1] * 9000).SerializeToString())
    assert refused.status is Status.RESOURCE_EXHAUSTED
    assert "have 72000 bytes of data; the limit is 65536 (max_body_bytes)" in refused.details
    assert port.gateway.asked == []


@on_port(max_body_bytes=1 << 23)
async def test_large_tensors_go_in_and_out_whole_and_nothing_stays_counted(port: Port) -> None:
    port.stand.learn("tensors", inputs=(TensorSpec("x", "FP32", (-1,)),))
    free = port.gateway.quotas.bytes.free
    client = port.client(**{"grpc.max_receive_message_length": -1})
    for size in (150_000, 1_500_000):
        data = np.random.default_rng(size).random(size, "<f4").tobytes()
        for form in (
            asked({"x": ("FP32", (1, size), data)}),
            typed("FP32", [1, size], fp32_contents=np.frombuffer(data, "<f4").tolist()),
        ):
            answer = answered(await client.ask(INFER, form.SerializeToString()))
            assert told(answer) == {"x": ("FP32", (1, size), data)}
    assert port.gateway.quotas.bytes.free == free


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        found = work()
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_raw_tensor_is_copied_once_on_its_way_in_and_once_on_its_way_out() -> None:
    known = ServedModels(["default"], Settings())
    known.learn([worker("tensors", inputs=(TensorSpec("x", "FP32", (-1,)),))])
    size = 600_000
    body = asked({"x": ("FP32", (1, size // 4), bytes(size))}).SerializeToString()
    read = infer_reader(Settings()).at_once
    exchange, peak = peak_of(lambda: read(body, RequestOptions(1.0), known))
    assert size < peak < 1.1 * size
    assert isinstance(exchange.input, Tensors)
    (_, answer), peak = peak_of(lambda: exchange.write(Outcome("", [exchange.input], 0.0, "1", [None])))
    assert size < peak < 1.1 * size
    assert told(answered(answer)) == {"x": ("FP32", (1, size // 4), bytes(size))}


async def test_predict_takes_and_gives_nested_arrays_in_json_and_an_object_of_several(port: Port) -> None:
    client = port.client()
    for inputs, text in (
        ((FOUR,), "[1, 2.5, -3, 4e2]"),
        ((FOUR,), " [[1, 2, 3, 4], [5, 6, 7, 8]]"),
        (NAMED, '{"query": [1, 2], "ids": [7], "texts": "a"}'),
    ):
        port.stand.learn("tensors", inputs=inputs)
        assert json.loads(predicted(await client.ask(PREDICT, predict(text))).output) == json.loads(text)
    assert [next(iter(arrays(each.input).values()))[1] for each in port.gateway.asked] == [(1, 4), (2, 4), (1, 2)]


@on_port(whole=True)
async def test_predict_refuses_what_is_no_tensor_of_the_model(port: Port) -> None:
    port.stand.learn("tensors", inputs=(FOUR,))
    client = port.client()
    for text, says in (
        ("abc", "the input is not JSON text: JSON is malformed"),
        (b"\xff", "the input is not JSON text"),
        ("[1, 2]", "the input `x` is FP32 of shape [1, 2]; the model takes `x`, FP32 of shape [-1, 4]"),
        ("[" * 100_000, "the input"),
    ):
        refused = await client.fail(PREDICT, predict(text))
        assert (refused.status, refused.trailers["x-headway-error"]) == BAD_REQUEST
        assert says in refused.details
    assert port.stand.runs == []


async def test_predict_writes_a_large_tensor_in_turns_and_says_which_numbers_json_has_not(port: Port) -> None:
    port.stand.learn("text", "tensors")
    client, rows = port.client(), np.arange(300_000, dtype="f4").reshape(1, -1, 3)
    port.gateway.output = tensors(True, y=rows)
    answer = predicted(await client.ask(PREDICT, predict("a")))
    assert json.loads(answer.output) == rows[0].tolist()
    port.gateway.output = tensors(True, y=np.array([[1, np.nan]], "f4"))
    refused = await client.fail(PREDICT, predict("a"))
    assert (refused.status, refused.trailers["x-headway-error"]) == (Status.INTERNAL, "BACKEND_ERROR")
    assert refused.details == (
        "the output `y` contains NaN or an infinity, which JSON cannot represent; request it in binary, "
        "by ModelInfer of the Open Inference Protocol"
    )


@on_port({"secret": {"rate": 1000.0, "burst": 10.0}}, whole=True)
async def test_a_long_message_is_charged_its_reading(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a limit of a thousand 1 MB messages would allow most of a minute of the event loop."""
    port.stand.learn("tensors", inputs=(INTEGERS,))
    charged: list[int] = []
    monkeypatch.setattr(Limiter, "charge_pages", lambda self, limits, pages: charged.append(pages))
    client = port.client()
    for numbers, pages in ((10, []), (100_000, [4, 1])):
        ones = [1] * numbers
        await client.call(PREDICT, predict(json.dumps(ones)), BEARER)
        await client.call(INFER, typed("INT64", [1, numbers], int64_contents=ones).SerializeToString(), BEARER)
        assert charged == pages


PAGES = predict(json.dumps([1] * 100_000))
"""Message that is charged as four requests."""


@pytest.mark.parametrize("as_stream", [False, True])
@on_port({"secret": {"rate": 1.0, "burst": 1.0}}, whole=True)
async def test_a_long_message_within_the_limit_is_not_refused_for_its_own_pages(port: Port, as_stream: bool) -> None:
    """As over HTTP, pages are charged after their request. Otherwise a small burst would allow no long message."""
    port.stand.learn("tensors", inputs=(INTEGERS,))
    client = port.client()
    if as_stream:
        many = typed("INT64", [1, 130_000], int64_contents=[1] * 130_000).SerializeToString()
        call = client.stream(STREAM, BEARER)
        answers = []
        for _ in range(2):
            await call.write(many)
            answers.append(streamed(await call.read()))
        first, second = answers
        assert first.error_message != second.error_message
        assert "over the limit" in second.error_message and "over the limit" not in first.error_message
    else:
        await client.ask(PREDICT, PAGES, BEARER)
        assert (await client.fail(PREDICT, PAGES, BEARER)).status is Status.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("as_stream", [False, True])
@on_port({"secret": {"rate": 1000.0, "burst": 10.0}})
async def test_a_call_that_ends_while_its_message_is_read_pays_for_the_pages_that_were(
    port: Port, monkeypatch: pytest.MonkeyPatch, as_stream: bool
) -> None:
    port.stand.learn("tensors", inputs=(INTEGERS,))
    charged, stopped, take, taken = list[int](), asyncio.Event(), MessageTurns.take, itertools.count()

    async def some(turns: MessageTurns, owner: str, work: Callable[[float], Any]) -> Any:
        if next(taken) == (1 if as_stream else 8):
            stopped.set()
            await asyncio.Event().wait()
        return await take(turns, owner, work)

    monkeypatch.setattr(MessageTurns, "take", some)
    monkeypatch.setattr(Limiter, "charge_pages", lambda self, limits, pages: charged.append(pages))
    client = port.client()
    if as_stream:
        call = client.stream(STREAM, BEARER)
        await call.write(typed("INT64", [1, 130_000], int64_contents=[1] * 130_000).SerializeToString())
    else:
        call = client.call(PREDICT, predict(json.dumps([1] * 300_000)), BEARER)
    await stopped.wait()
    assert not charged
    call.cancel()
    while not charged:  # noqa: ASYNC110 - the port runs in this loop and has no event to await
        await asyncio.sleep(0)
    assert port.gateway.asked == []


async def test_a_message_whose_time_passes_unread_stays_unread(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    port.stand.learn("tensors", inputs=(INTEGERS,))
    seconds = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr("headway.grpc.inference_call.monotonic", lambda: float(next(seconds)))
        late = await port.client().fail(PREDICT, PAGES, (("x-request-timeout-ms", "2000"),))
    assert late.status is Status.DEADLINE_EXCEEDED
    assert late.details == "the total deadline of 2000 ms passed while the body waited for its turn to be read"
    assert port.gateway.asked == []


READ = infer_reader(Settings()).at_once


def message(drawn: list[Drawn], raw: bool, **members: Any) -> bytes:
    """Return a request with these inputs. Their data is raw, or typed where possible."""
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
    """Return models, one of which takes and gives tensors like these if `takes` is set. `free` leaves their sizes open."""
    known, heads = ServedModels(["default"], Settings()), [one.tensor.head for one in drawn]
    if takes is not None:
        specs = tuple(TensorSpec(one.name, one.datatype, tuple(-1 if free else size for size in one.shape[1:])) for one in heads)  # fmt: skip
        known.learn([worker("tensors", inputs=specs, outputs=specs)])
    return known


@given(several(), st.booleans(), st.data())
def test_any_tensors_go_in_and_out_byte_for_byte(drawn: list[Drawn], raw: bool, data: st.DataObject) -> None:
    takes = data.draw(st.sampled_from([ValueKind.TENSORS, None]))
    order = data.draw(st.permutations(drawn))
    wanted = order[: data.draw(st.integers(0, len(order)))]
    body = message(drawn, raw, outputs=[{"name": one.tensor.head.name} for one in wanted])
    if data.draw(st.booleans()):  # It is read like a large message; the parameter goes to the target.
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
    """Draw tensors, and a message with them that is damaged in a few places."""
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


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(damaged(), min_size=1, max_size=15))
def test_damaged_messages_leave_their_connection_intact(drawn: list[tuple[list[Drawn], bytes]]) -> None:
    async def main(port: Port) -> None:
        client = port.client()
        heads = [one.tensor.head for one in drawn[0][0]]
        specs = tuple(TensorSpec(head.name, head.datatype, head.shape[1:]) for head in heads)
        for inputs in ((), specs):
            port.stand.learn("tensors", inputs=inputs)
            calls = [client.call(way, body) for _, body in drawn for way in (INFER, PREDICT)]
            assert {await call.code() for call in calls} <= REFUSED
            stream = client.stream(STREAM)
            for _, body in drawn:
                await stream.write(body)
            await stream.done_writing()
            for _ in drawn:
                assert streamed(await asyncio.wait_for(stream.read(), 10)).error_message != UNFORESEEN
            assert await stream.code() is Status.OK
        port.stand.learn("text")
        await client.ask(INFER, request("a").SerializeToString())

    served(main, whole=True)
