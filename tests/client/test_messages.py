"""How the clients write requests and read answers, without a network."""

import pickle
from typing import Any

import pytest

from headway import errors
from headway.client import ApiError, ClientError, DeadlineExceeded, InvalidInput, Overloaded, RateLimited, Result
from headway.client.errors import BY_CODE
from headway.client.messages import Answer, inference, read_error, read_outcome, read_result, read_task, task
from headway.http.problem import encode_problem
from headway.model import Failure

NO_CLASS = {"METHOD_NOT_ALLOWED", "NOT_IMPLEMENTED", "REQUEST_TIMEOUT", "HEADERS_TOO_LARGE", "INTERNAL"}
"""Codes that only occur because of a bug in the client or the service, so they are plain ApiErrors."""


def test_every_error_of_the_service_has_a_class() -> None:
    assert {errors.SHOWN.get(code, code) for code in errors.CODES} - NO_CLASS - BY_CODE.keys() == set()


@pytest.mark.parametrize("code", [code for code in errors.CODES if code not in NO_CLASS])
def test_a_problem_document_becomes_its_error(code: str) -> None:
    header, body = encode_problem(Failure(code, "what happened", 1.5), "req_7")
    error = read_error(Answer(errors.STATUS[code], header, body))
    assert type(error) is BY_CODE[errors.SHOWN.get(code, code)]
    assert (error.message, error.status, error.request_id) == ("what happened", errors.STATUS[code], "req_7")
    assert error.hopeless is (code in errors.HOPELESS)
    assert error.retry_after == 1.5
    assert str(error) == f"what happened ({error.status} {error.code}, req_7)"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, Overloaded), (504, DeadlineExceeded), (429, RateLimited), (502, ApiError), (301, ApiError)],
)
def test_an_answer_of_a_proxy_is_an_error_by_its_status(status: int, kind: type[ApiError]) -> None:
    error = read_error(Answer(status, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, b"<html>\n no upstream</html>"))
    assert type(error) is kind
    assert (error.message, error.code, error.retry_after) == ("<html> no upstream</html>", "", None)


def test_errors_survive_a_process_boundary() -> None:
    error = ApiError("m", status=503, code="DRAINING", request_id="req_1", retry_after=1.0, hopeless=True)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_only_what_is_given_is_sent() -> None:
    bare, full = inference("ä", None, None, ""), inference({"a": [1, None]}, "m", {"n": 1}, "k")
    assert (bare.body, "Idempotency-Key" in bare.header) == ('{"input":"ä"}'.encode(), False)
    assert full.body == b'{"input":{"a":[1,null]},"model":"m","parameters":{"n":1}}'
    assert full.header["Idempotency-Key"] == "k"


@pytest.mark.parametrize("input", [float("nan"), {1, 2}, b"bytes", bytearray(b"a"), object(), "\ud800"])
def test_what_is_no_json_is_refused_before_it_is_sent(input: Any) -> None:
    for kind in (InvalidInput, ClientError, TypeError, ValueError):
        with pytest.raises(kind, match="base64" if isinstance(input, bytes | bytearray) else r"input.*\. |base64"):
            inference(input, None, None, "")


@pytest.mark.parametrize(
    ("input", "model", "parameters", "told"),
    [
        (object(), None, None, r"^input of type object: is not JSON: .*not JSON serializable\. Send text"),
        ("x", None, {"n": {1}}, r"^parameters of type dict: is not JSON"),
        ("x", None, "n", r"^parameters of type str: must be a dict"),
        ("x", object(), None, r"^model of type object: is not JSON"),
    ],
)
def test_what_cannot_be_sent_is_told_with_what_can(input: Any, model: Any, parameters: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        inference(input, model, parameters, "")


def test_the_time_of_a_task_is_told_to_the_service() -> None:
    assert "X-Request-Timeout-Ms" not in task("x", None, None, "", None).header
    assert task("x", None, None, "", 1.5).header["X-Request-Timeout-Ms"] == "1500"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"output": 1}', b"\xff"])
@pytest.mark.parametrize("read", [read_result, read_task, read_outcome])
def test_an_answer_that_is_not_headways_says_so(read: Any, body: bytes) -> None:
    with pytest.raises(ApiError, match="is not Headway's"):
        read(Answer(200, {}, body))


def test_outcomes_of_tasks_are_read() -> None:
    def outcome(body: bytes) -> Any:
        return read_outcome(Answer(200, {}, body))

    assert outcome(b'{"task_id":"req_1","status":"PENDING"}') == ("PENDING", None)
    assert outcome(b'{"task_id":"req_1","status":"SUCCESS","output":[1]}') == ("SUCCESS", Result([1], "req_1"))
    told = b'{"task_id":"req_1","status":"SUCCESS","output":1,"metadata":{"tokens_used":7,"model_version":"2"}}'
    assert outcome(told) == ("SUCCESS", Result(1, "req_1", None, 7, "2"))
    state, error = outcome(
        b'{"task_id":"req_1","status":"FAILED","error":{"error":"DEADLINE_EXCEEDED","message":"late","status":504}}'
    )
    assert (state, type(error), error.status) == ("FAILED", DeadlineExceeded, 504)
