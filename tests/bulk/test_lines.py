"""Lines of batches: whatever stands in one, or comes of it, it has its record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bulk.forms import AskedLine, NotYet
from headway.config import Settings
from headway.errors import CANCELLED
from headway.gateway.served_models import ServedModels
from headway.http.openai.bulk_lines import OpenAILines
from headway.model import Failure, Reply
from headway.model.bulk import BulkJob
from headway.runtime.request_id import new_id

JOB = BulkJob(
    id="batch_1",
    tenant="acme",
    user="ann",
    endpoint="/v1/completions",
    input_file="file-1",
    created_at=0.0,
    expires_at=1.0,
)
GOOD = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "default", "prompt": "a"}}


def lines(*models: str) -> OpenAILines:
    return OpenAILines(Settings(), ServedModels(models or ("default",)), new_id)


def told(record: bytes) -> dict[str, Any]:
    assert b"\n" not in record
    found: dict[str, Any] = json.loads(record)
    return found


def asked(form: OpenAILines, **change: Any) -> AskedLine:
    found = form.read(JOB, 3, json.dumps({**GOOD, **change}).encode())
    assert isinstance(found, AskedLine), found
    return found


@given(text=st.binary(max_size=60) | st.recursive(st.none() | st.text(), lambda of: st.dictionaries(st.sampled_from([*GOOD, "x"]), of)).map(lambda one: json.dumps(one).encode()))  # fmt: skip
def test_any_line_that_is_no_request_has_its_record(text: bytes) -> None:
    found = lines().read(JOB, 3, text)
    assert isinstance(found, bytes)
    record = told(found)
    assert (record["line"], record["error"]) == (3, None)
    assert 400 <= record["response"]["status_code"] < 500 and record["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("code", ["BACKEND_ERROR", "REJECTED_BY_MODEL", CANCELLED, "of the future"])
def test_any_failure_has_its_record(code: str) -> None:
    answered, record = asked(lines()).record(Reply("id", "acme", None, Failure(code, "lone \ud800")))
    assert not answered and told(record)["response"]["status_code"] >= 400 and told(record)["custom_id"] == "1"


@pytest.mark.parametrize("output", ["lone \ud800", b'{\n "text": "b"\n}', 3])
def test_any_output_has_its_record(output: Any) -> None:
    answered, record = asked(lines()).record(Reply("id", "acme", output))
    assert (told(record)["response"]["status_code"] == 200) is answered


def test_a_line_is_not_judged_while_no_model_is_known() -> None:
    form = OpenAILines(Settings(), ServedModels(()), new_id)
    with pytest.raises(NotYet):
        form.read(JOB, 3, json.dumps(GOOD).encode())


def test_a_line_for_a_model_that_the_credential_may_not_ask_is_refused() -> None:
    form = lines("default", "secret")
    mine = BulkJob(**{**{name: getattr(JOB, name) for name in JOB.__struct_fields__}, "models": ("default",)})
    body = {"model": "secret", "prompt": "a"}
    found = form.read(mine, 3, json.dumps({**GOOD, "body": body}).encode())
    assert isinstance(found, bytes) and told(found)["response"]["status_code"] == 404
