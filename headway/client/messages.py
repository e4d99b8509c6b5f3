"""Encode requests to the service, and decode its answers. No I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from headway.client.errors import BY_CODE, BY_STATUS, ApiError, InvalidArgument, InvalidInput

T = TypeVar("T")
State = Literal["PENDING", "SUCCESS", "FAILED"]

ROUTE = "/v1/inference"  # Path of inferences and tasks, relative to the service's address.
_RESULT = "/v1/result/"
_SHOWN_BODY = 200
_OCTETS = "an input of bytes is not JSON; for a target that takes bytes, send base64.b64encode(input).decode()"
_VALUES = "Send text, a number, True, False, None, or lists and dicts of these with strings as keys; for an array or tensor, its .tolist()."
ODD = "the answer is not Headway's; does the URL lead to a Headway service?"


class Result(msgspec.Struct, frozen=True):
    """The model's answer to one input.

    Attributes:
        output: a string or any other JSON value that the target returns. For arrays: a NumPy array or a dict of named arrays. Strings
            in arrays are UTF-8 bytes.
        request_id: id of the request in the service's log and ledger.
        latency_ms: milliseconds from receiving the complete request to its answer, as measured by the service; None for tasks and arrays.
        tokens_used: None if the target doesn't report them.
        model_version: empty if the service doesn't report it.
    """

    output: Any
    request_id: str
    latency_ms: float | None = None
    tokens_used: int | None = None
    model_version: str = ""


class Request(msgspec.Struct, frozen=True):
    """HTTP request of a call, the same for each attempt. If `timed`, each attempt also sends the caller's remaining time."""

    method: str
    path: str
    header: Mapping[str, str]
    body: bytes | None = None
    timed: bool = False


class Answer(msgspec.Struct, frozen=True):
    """HTTP answer. Names in `header` are case-insensitive."""

    status: int
    header: Mapping[str, str]
    body: bytes


def inference(input: Any, model: str | None, parameters: Mapping[str, Any] | None, key: str) -> Request:
    """Build the request for one inference. The idempotency `key` may be empty. Raises InvalidInput for values other than JSON."""
    return Request("POST", ROUTE, _json_header(key), _body(input, model, parameters), timed=True)


def task(
    input: Any, model: str | None, parameters: Mapping[str, Any] | None, key: str, timeout: float | None
) -> Request:
    """Build the request that submits a task, which may take `timeout` seconds in total."""
    header = {**_json_header(key), "Prefer": "respond-async"}
    if timeout is not None:
        check_seconds("timeout", timeout)
        header["X-Request-Timeout-Ms"] = milliseconds(timeout)
    return Request("POST", ROUTE, header, _body(input, model, parameters))


def poll(task_id: str, wait: float) -> Request:
    """Build the request that waits up to `wait` seconds for the outcome of a task."""
    return Request("GET", f"{_RESULT}{task_id}?wait={wait:.3f}" if wait > 0 else _RESULT + task_id, {})


def forget(task_id: str) -> Request:
    """Build the request that cancels a task."""
    return Request("DELETE", _RESULT + task_id, {})


def check_inputs(inputs: object) -> Iterable[Any]:
    """Return `inputs` unchanged. Raises InvalidInput unless it is an iterable other than a string, bytes or a mapping."""
    kind, hint = type(inputs).__name__, "For a single input call infer, or give a list: [input]."
    if not isinstance(inputs, Iterable) or isinstance(inputs, str | bytes | bytearray | memoryview | Mapping):
        raise InvalidInput(f"inputs of type {kind} are not a list of inputs. {hint}")
    return inputs


def check_seconds(name: str, value: object) -> None:
    """Raise InvalidArgument unless the value of an argument in seconds is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidArgument(name, value, "must be a number of seconds above 0", "For example 10.")


def milliseconds(seconds: float) -> str:
    """Format seconds for `X-Request-Timeout-Ms`."""
    return str(max(round(seconds * 1000), 1))


def _json_header(key: str) -> dict[str, str]:
    header = {"Content-Type": "application/json"}
    return {**header, "Idempotency-Key": key} if key else header


def json_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as a dict. Raises InvalidInput if they are not a mapping."""
    if not isinstance(parameters, Mapping):
        raise InvalidInput(f"parameters of type {type(parameters).__name__}: must be a dict, such as {{'length': 3}}.")
    return dict(parameters)


def as_json(body: Mapping[str, Any]) -> bytes:
    """Encode a body. Raises InvalidInput if a member is not JSON."""
    try:
        return _json(body)
    except (TypeError, ValueError, RecursionError):
        for name, value in body.items():
            try:
                _json(value)
            except (TypeError, ValueError, RecursionError) as exc:
                raise InvalidInput(f"{name} of type {type(value).__name__}: is not JSON: {exc}. {_VALUES}") from None
        raise


def _body(input: Any, model: str | None, parameters: Mapping[str, Any] | None) -> bytes:
    if isinstance(input, bytes | bytearray | memoryview):
        raise InvalidInput(_OCTETS)
    body: dict[str, Any] = {"input": input}
    if model is not None:
        body["model"] = model
    if parameters is not None:
        body["parameters"] = json_parameters(parameters)
    return as_json(body)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class _Metadata(msgspec.Struct, frozen=True, gc=False):
    latency_ms: float | None = None
    tokens_used: int | None = None
    model_version: str = ""


class _Inferred(msgspec.Struct, gc=False):
    request_id: str
    output: Any
    metadata: _Metadata = _Metadata()


class _Submitted(msgspec.Struct, gc=False):
    task_id: str


class _Problem(msgspec.Struct, gc=False):
    error: str
    message: str = ""
    status: int = 0
    request_id: str = ""
    retry_after_ms: float | None = None


class _Outcome(msgspec.Struct, gc=False):
    task_id: str
    status: State
    output: Any = None
    metadata: _Metadata = _Metadata()
    error: _Problem | None = None


_inferred = msgspec.json.Decoder(_Inferred).decode
_submitted = msgspec.json.Decoder(_Submitted).decode
_problem = msgspec.json.Decoder(_Problem).decode
_outcome = msgspec.json.Decoder(_Outcome).decode


def read_result(answer: Answer) -> Result:
    """Read the answer to `inference`."""
    parsed = _decoded(_inferred, answer)
    return _result(parsed.output, parsed.request_id, parsed.metadata)


def _result(output: Any, id: str, metadata: _Metadata) -> Result:
    return Result(output, id, metadata.latency_ms, metadata.tokens_used, metadata.model_version)


def read_task(answer: Answer) -> str:
    """Read the task's id from the answer to `task`."""
    return _decoded(_submitted, answer).task_id


def read_outcome(answer: Answer) -> tuple[State, Result | ApiError | None]:
    """Read the state of a task from the answer to `poll`, and its outcome if the task has ended."""
    parsed = _decoded(_outcome, answer)
    if parsed.error is not None:
        return "FAILED", _error(parsed.error, parsed.error.status, hopeless=False)
    if parsed.status != "SUCCESS":
        return parsed.status, None
    return parsed.status, _result(parsed.output, parsed.task_id, parsed.metadata)


def read_error(answer: Answer) -> ApiError:
    """Return the error in an answer with an error status."""
    hopeless = answer.header.get("x-should-retry", "").lower() == "false"
    try:
        problem = _problem(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = " ".join(answer.body[:_SHOWN_BODY].decode("utf-8", "replace").split())
        kind = BY_STATUS.get(answer.status, ApiError)
        return kind(text or "no content", status=answer.status, retry_after=_pause(answer), hopeless=hopeless)
    if not problem.status:  # The body of an Open Inference Protocol error contains only the message.
        code, id = (answer.header.get(name, "") for name in ("x-headway-error", "x-request-id"))
        problem = _Problem(code, problem.error, request_id=id)
    error = _error(problem, answer.status, hopeless)
    pause = _pause(answer)
    error.retry_after = error.retry_after if pause is None else pause
    return error


def _error(problem: _Problem, status: int, hopeless: bool) -> ApiError:
    after = None if problem.retry_after_ms is None else problem.retry_after_ms / 1000
    kind = BY_CODE.get(problem.error) or BY_STATUS.get(status, ApiError)
    return kind(
        problem.message, status=status, code=problem.error, request_id=problem.request_id, retry_after=after, hopeless=hopeless,
    )  # fmt: skip


def _pause(answer: Answer) -> float | None:
    for field, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(float(answer.header[field]) * unit, 0.0)
        except (KeyError, ValueError):
            continue
    return None


def _decoded(decode: Callable[[bytes], T], answer: Answer) -> T:
    try:
        return decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(ODD, status=answer.status, hopeless=True) from None
