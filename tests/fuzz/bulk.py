"""Input for bulk jobs: multipart forms with files, and the lines of those files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

from headway.bulk.lines import AskedLine
from headway.config import Settings
from headway.core.json_pages import finish
from headway.errors import BadRequest
from headway.gateway.served_models import ServedModels
from headway.http.openai.bulk import MOST_PARTS, parts
from headway.http.openai.bulk_lines import READERS, OpenAILines
from headway.http.openai.members import MOST_TEXTS
from headway.model import Failure, Reply
from headway.model.bulk import BulkJob
from headway.runtime.request_id import new_id

_KIND = {"content-type": "multipart/form-data; boundary=b"}
_PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\nlines\r\n'
FORMS = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + _PART + b"--b--\r\n",
    b"preamble\r\n" + _PART + b"--b--epilogue",
    _PART * (MOST_PARTS + 1) + b"--b--",
    b"--b\r\ncontent-disposition: form-data; name=n; filename*=UTF-8''%c3%a9\r\n\r\n\r\n--b--",
)
FORM_WORDS = (
    b"\r\n",
    b"--b",
    b"--b--",
    b"--",
    b"\r\n\r\n",
    b"name=",
    b'"',
    b"\\",
    b"filename*=",
    b"%",
    b"form-data;",
    _PART * 20,
)


def check_form(data: bytes) -> None:
    """A form has the same parts however its bytes are split, or is always refused."""
    whole, bits = (_parts([data[at : at + size] for at in range(0, len(data), size)]) for size in (1 << 20, 7))
    assert whole == bits
    assert whole is None or len(whole) <= MOST_PARTS


def _parts(pieces: Sequence[bytes]) -> list[tuple[str, str | None, bytes]] | None:
    async def come() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def read() -> list[tuple[str, str | None, bytes]]:
        return [
            (one.name, one.filename, b"".join([piece async for piece in one.content]))
            async for one in parts(_KIND, come())
        ]

    reading = read()
    try:
        for _ in range(MOST_PARTS + 1):  # It yields to other tasks after each part.
            reading.send(None)
    except StopIteration as end:
        found: list[tuple[str, str | None, bytes]] = end.value
        return found
    except BadRequest:
        return None
    raise AssertionError("it waits for something")


_SETTINGS = Settings(), Settings(max_queue=5)
_LINES = [(settings, OpenAILines(settings, ServedModels(["m"]), new_id)) for settings in _SETTINGS]
LINES = (
    b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":["a","b"],"n":2,"top_k":3}}',
    b'{"custom_id":"2","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"hi"}],"n":3}}',
    b'{"custom_id":"3","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":["a","b"],"encoding_format":"base64"}}',
)
LINE_WORDS = (
    b'"custom_id":', b'"method":"POST"', b'"url":', b'"body":', b'"prompt":', b'"input":', b'"n":', b'"n":128', b'"stream":true', b'["a"],' * 40,
    b"null", b"{}", b"[" * 60, b"\\ud800", b"\\u0000", b"1e400", b'"/v1/completions"',
)  # fmt: skip


def check_line(data: bytes) -> None:
    """A line becomes runnable parts or an error record. Either way it ends up as one record on one line."""
    for (settings, form), endpoint in ((of, path) for of in _LINES for path in READERS):
        job = BulkJob(
            id="batch_1", tenant="t", user="u", endpoint=endpoint, input_file="file-1", created_at=0.0, expires_at=1.0
        )
        _check_record(form.expired(3, data), False)
        found = finish(form.read(job, 3, data))
        if isinstance(found, bytes):
            _check_record(found, True)
            continue
        assert 1 <= len(found.parts) <= min(MOST_TEXTS, settings.max_queue)
        assert [one.part for one in found.parts] == [*range(len(found.parts))]
        output = "[0.5, 1e300]" if endpoint == "/v1/embeddings" else "out"
        _check_record(_made(found, [Reply("id", "t", output)] * len(found.parts)), True)
        _check_record(_made(found, Failure("BACKEND_ERROR", "no")), True)


def _made(line: AskedLine, ended: Sequence[Reply] | Failure) -> bytes:
    *_, last = line.record(ended)
    assert last is not None
    return last[1]


def _check_record(record: bytes, responds: bool) -> None:
    assert b"\n" not in record
    told = json.loads(record)
    assert told["id"].startswith("batch_req_")
    assert (told["error"] is None) is responds
    assert not responds or told["response"]["status_code"] in (200, 400, 404, 413, 422, 502)
