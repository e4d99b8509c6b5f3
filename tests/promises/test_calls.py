"""How clients read answers: errors of calls, errors of APIs without codes, and streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headway import protos
from headway.core import failures
from tests.promises.calls import Answered, Stream, answered
from tests.promises.ways_in import CALL, COMPLETIONS, OIP_JSON, STREAM

_RESPONSE = protos.message("inference.ModelStreamInferResponse")


class Opened:
    """A fake stream call. Gives these answers once as many requests have arrived, and then ends."""

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
    made = _RESPONSE(error_message=code and f"what is {code}", infer_response={"id": id})
    if code:
        made.infer_response.parameters["x-headway-error"].string_param = code
        made.infer_response.parameters["grpc-retry-pushback-ms"].string_param = "1000"
    else:
        made.infer_response.outputs.add(name="OUTPUT", datatype="BYTES", shape=[1])
        made.infer_response.raw_output_contents.append(len(output).to_bytes(4, "little") + output.encode())
    return bytes(made.SerializeToString())


def told(answers: list[bytes], ends: BaseException | None, *texts: str) -> list[Answered]:
    """Return what requests with these texts get from a stream with these answers."""

    async def main() -> list[Answered]:
        opened: Any = Opened(answers, ends)
        opened.most = len(texts)
        stream = Stream(opened)
        heard = list(await asyncio.gather(*(stream.ask(STREAM.write([text]), text) for text in texts)))
        await stream.close()
        return heard

    return asyncio.run(main())


def failure(status: grpc.StatusCode, code: str, details: str = "over") -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(*((("x-headway-error", code),) if code else ()))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailers, details)


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


LATENESS = failures.lateness(0.5, attempts=0, slots=0, queue_due=True)


@pytest.mark.parametrize(
    ("status", "openai", "message", "code"),
    [
        (429, "rate_limit_exceeded", "over the limit of 240 requests a minute, 40 at once", "RATE_LIMITED"),
        (429, "rate_limit_exceeded", "shed: this tier is limited to what the fleet can handle", "SHED"),
        *(
            (503, "server_is_overloaded", failure.message, failure.code)
            for failure in (failures.version_unknown("m", "9"), failures.not_here("m"), failures.lost_input(), LATENESS)
        ),
    ],
)
def test_apis_that_tell_no_code_are_understood_by_the_message(
    status: int, openai: str, message: str, code: str
) -> None:
    told = json.dumps({"error": {"message": message, "code": openai}}).encode()
    assert COMPLETIONS.read(status, {}, told).code == code
    assert OIP_JSON.read(status, {}, json.dumps({"error": message}).encode()).code == code


@pytest.mark.parametrize(
    ("status", "code", "read"),
    [
        (grpc.StatusCode.ABORTED, "IDEMPOTENCY_CONFLICT", 409),
        (grpc.StatusCode.INVALID_ARGUMENT, "IDEMPOTENCY_CONFLICT", 422),
        (grpc.StatusCode.INVALID_ARGUMENT, "REJECTED_BY_MODEL", 422),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED", 429),
        (grpc.StatusCode.UNAVAILABLE, "SERVICE_OVERLOADED", 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", 408),
        (grpc.StatusCode.UNAVAILABLE, "REJECTED_BY_MODEL", 500),
        (grpc.StatusCode.UNAVAILABLE, "", 0),
    ],
)
def test_the_status_of_a_call_is_read_as_https_and_fits_its_code(status: grpc.StatusCode, code: str, read: int) -> None:
    async def fail() -> bytes:
        raise failure(status, code, "input 3 of 5, counted from 0: no")

    answer = asyncio.run(answered(CALL, fail()))
    assert (answer.status, answer.blamed) == (read, 3 if code else -1)
