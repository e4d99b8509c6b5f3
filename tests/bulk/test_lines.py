"""Lines of batches: whatever stands in one, or comes of it, it has its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bulk.folder import BulkFolder
from headway.bulk.lines import AskedLine, LineSplitter, NotYet, pages
from headway.config import Settings
from headway.core.json_pages import finish
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
    found = finish(form.read(JOB, 3, json.dumps({**GOOD, **change}).encode()))
    assert isinstance(found, AskedLine), found
    return found


def made(line: AskedLine, *replies: Reply) -> tuple[bool, bytes]:
    *_, found = [line.take(at, reply) for at, reply in enumerate(replies)]
    assert found is not None
    *_, record = found
    assert record is not None
    return record


@given(text=st.binary(max_size=60) | st.recursive(st.none() | st.text(), lambda of: st.dictionaries(st.sampled_from([*GOOD, "x"]), of)).map(lambda one: json.dumps(one).encode()))  # fmt: skip
def test_any_line_that_is_no_request_has_its_record(text: bytes) -> None:
    found = finish(lines().read(JOB, 3, text))
    assert isinstance(found, bytes)
    record = told(found)
    assert (record["line"], record["error"]) == (3, None)
    assert 400 <= record["response"]["status_code"] < 500 and record["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("code", ["BACKEND_ERROR", "REJECTED_BY_MODEL", CANCELLED, "of the future"])
def test_any_failure_has_its_record(code: str) -> None:
    answered, record = made(asked(lines()), Reply("id", "acme", None, Failure(code, "lone \ud800")))
    assert not answered and told(record)["response"]["status_code"] >= 400 and told(record)["custom_id"] == "1"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("output", ["lone \ud800", b'{\n "text": "b"\n}', b'{"text": 3}'])
def test_any_output_has_its_record(output: Any, prompt: Any) -> None:
    line = asked(lines(), body={"model": "default", "prompt": prompt})
    answered, record = made(line, *([Reply("id", "acme", output)] * len(line.parts)))
    assert (told(record)["response"]["status_code"] == 200) is answered


def test_a_fault_at_a_line_has_its_record() -> None:
    answered, record = made(asked(lines()), Reply("id", "acme", 3))  # type: ignore[arg-type]
    assert not answered and told(record)["response"]["status_code"] == 500


def test_choices_of_several_prompts_are_parts_in_the_order_of_the_route() -> None:
    line = asked(lines(), body={"model": "default", "prompt": ["a", "b"], "n": 2, "top_k": 3})
    assert [(part.part, part.input, part.parameters) for part in line.parts] == [
        (at, input, b'{"top_k":3}') for at, input in enumerate("aabb")
    ]
    answered, record = made(line, *(Reply("id", "acme", f"{part.input!s}{part.part}") for part in line.parts))
    choices = told(record)["response"]["body"]["choices"]
    assert answered and [(one["index"], one["text"]) for one in choices] == [(0, "a0"), (1, "a1"), (2, "b2"), (3, "b3")]


def test_a_failed_part_fails_its_line_with_the_errors_of_its_route() -> None:
    line = asked(lines(), body={"model": "default", "prompt": ["a", "b"]})
    assert line.take(0, Reply("id", "acme", "a")) is None
    making = line.take(1, Reply("id", "acme", None, Failure("REJECTED_BY_MODEL", "no")))
    assert making is not None and line.take(1, Reply("id", "acme", "b")) is None
    body = told(next(making)[1])["response"]["body"]  # type: ignore[index]
    assert body["error"]["message"].startswith("input 1 of 2, counted from 0: no")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": ["a"] * 2_049}, 413),
        ({"prompt": ["a"] * 2_000, "n": 2}, 413),
        ({"prompt": "a" * 900_000, "n": 100}, 413),
        ({"prompt": [], "n": 2}, 400),
        ({"prompt": "a", "n": 0}, 400),
    ],
)
def test_a_line_has_as_many_parts_at_most_as_a_request(body: dict[str, Any], status: int) -> None:
    found = finish(lines().read(JOB, 3, json.dumps({**GOOD, "body": {"model": "default", **body}}).encode()))
    assert isinstance(found, bytes) and told(found)["response"]["status_code"] == status


def test_a_large_answer_is_made_bit_by_bit() -> None:
    line = asked(lines(), body={"model": "default", "prompt": ["a"] * 1_000})
    making = line.record([Reply("id", "acme", "x" * 5_000)] * 1_000)
    *steps, last = making
    assert len(steps) > 20 and last is not None
    assert len(told(last[1])["response"]["body"]["choices"]) == 1_000


def test_a_line_is_not_judged_while_no_model_is_known() -> None:
    form = OpenAILines(Settings(), ServedModels(()), new_id)
    with pytest.raises(NotYet):
        finish(form.read(JOB, 3, json.dumps(GOOD).encode()))


def test_a_line_for_a_model_that_the_credential_may_not_ask_is_refused() -> None:
    form = lines("default", "secret")
    mine = BulkJob(**{**{name: getattr(JOB, name) for name in JOB.__struct_fields__}, "models": ("default",)})
    body = {"model": "secret", "prompt": "a"}
    found = finish(form.read(mine, 3, json.dumps({**GOOD, "body": body}).encode()))
    assert isinstance(found, bytes) and told(found)["response"]["status_code"] == 404


@given(pieces=st.lists(st.text("ab\n", max_size=9).map(str.encode)), most=st.integers(1, 8))
def test_pieces_of_a_file_are_split_into_lines_of_a_bounded_length(pieces: list[bytes], most: int) -> None:
    splitter = LineSplitter(most)
    found = [line for piece in pieces for line in splitter.feed(piece)]
    assert [*found, splitter.end()] == [line[: most + 1] for line in b"".join(pieces).split(b"\n")]


def test_a_file_of_utf_16_is_refused_by_name() -> None:
    for text in (json.dumps(GOOD) + "\n" + json.dumps(GOOD)).encode("utf-16").split(b"\n"):
        record = finish(lines().read(JOB, 1, text))
        assert isinstance(record, bytes)
        assert "UTF-16" in told(record)["response"]["body"]["error"]["message"]


def test_a_line_that_begins_with_a_zero_octet_is_told_so() -> None:
    record = finish(lines().read(JOB, 1, b"\0" + json.dumps(GOOD).encode()))
    assert isinstance(record, bytes)
    assert "begins with a zero octet" in told(record)["response"]["body"]["error"]["message"]


async def test_a_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    folder = BulkFolder(str(tmp_path))
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfabcd\n\xef\xbb\xbf")
    found = [one for page in [page async for page in pages(folder, "marked", 4)] for one in page]
    assert found == [(1, b"abcd"), (2, b"\xef\xbb\xbf")]
