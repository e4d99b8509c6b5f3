"""Streams as clients of histories use them: each request gets its own answer, or is told what has ended the stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headway.grpc import messages
from tests.promises.calls import Answered, Stream
from tests.promises.ways_in import STREAM

_RESPONSE = messages.message("inference.ModelStreamInferResponse")


class Opened:
    """Call with a stream: gives these answers as soon as as many requests are there, and then ends."""

    def __init__(self, answers: list[bytes], ends: BaseException | None) -> None:
        self.sent: list[bytes] = []
        self.full = asyncio.Event()
        self._answers = answers
        self._ends = ends
        self.most = len(answers)

    async def write(self, body: bytes) -> None:
        self.sent.append(body)
        if len(self.sent) == self.most:
            self.full.set()

    async def done_writing(self) -> None:
        self.full.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self.full.wait()
        for one in self._answers:
            yield one
        if self._ends is not None:
            raise self._ends


def answer(id: str, output: str = "", code: str = "") -> bytes:
    """Message of an answer: an output, or an error with this code."""
    made = _RESPONSE(error_message=code and f"what is {code}", infer_response={"id": id})
    if code:
        made.infer_response.parameters["x-headway-error"].string_param = code
        made.infer_response.parameters["grpc-retry-pushback-ms"].string_param = "1000"
    else:
        made.infer_response.outputs.add(name="OUTPUT", datatype="BYTES", shape=[1])
        made.infer_response.raw_output_contents.append(len(output).to_bytes(4, "little") + output.encode())
    return bytes(made.SerializeToString())


def told(answers: list[bytes], ends: BaseException | None, *texts: str) -> list[Answered]:
    """What requests of these texts are told by a stream of so many answers."""

    async def main() -> list[Answered]:
        opened: Any = Opened(answers, ends)
        opened.most = len(texts)
        stream = Stream(opened)
        found = list(await asyncio.gather(*(stream.ask(STREAM.write([text]), text) for text in texts)))
        await stream.close()
        return found

    return asyncio.run(main())


def failure(status: grpc.StatusCode, code: str) -> grpc.aio.AioRpcError:
    """End of a call with an error."""
    trailers = grpc.aio.Metadata(*((("x-headway-error", code),) if code else ()))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailers, "over")


def test_each_request_of_a_stream_gets_its_own_answer_or_error() -> None:
    found = told([answer("a", "A|1.0"), answer("b", code="SERVICE_OVERLOADED")], None, "a", "b")
    assert [(one.status, one.code, one.told.outputs) for one in found] == [
        (200, "", ["A|1.0"]),
        (503, "SERVICE_OVERLOADED", []),
    ]


def test_of_a_stream_that_ended_or_failed_what_has_no_answer_is_told() -> None:
    ended = failure(grpc.StatusCode.UNAVAILABLE, "DRAINING")
    found = told([answer("a", "A|1.0")], ended, "a", "b")
    assert [(one.status, one.taken) for one in found] == [(200, True), (503, False)]
    found = told([], failure(grpc.StatusCode.UNAVAILABLE, ""), "a")
    assert [(one.status, one.taken) for one in found] == [(0, True)]


def test_answers_of_a_stream_in_another_order_are_found_out() -> None:
    with pytest.raises(AssertionError, match="another order"):
        told([answer("b", "B|1.1"), answer("a", "A|1.0")], None, "a", "b")
