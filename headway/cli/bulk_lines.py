"""Lines of a file for a bulk job: requests pass through, texts become requests. `bulk` sends them; this only reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import IO, Any

import msgspec

from headway.errors import HeadwayError

COMPLETIONS, CHAT, EMBEDDINGS = ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
PIECE = 1 << 16
"""Bytes of a file that are sent or fetched at a time."""
LOOKED_AT = 100
"""Non-empty lines that decide whether a file holds requests."""
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")
_UTF_16 = "is UTF-16, it has to be UTF-8: `iconv -f UTF-16 -t UTF-8` makes it so"


class BulkError(HeadwayError):
    """A bulk job cannot be made, or the public port cannot be reached or refuses."""


def read_lines(
    file: IO[bytes], name: str, model: str | None, endpoint: str | None, texts: bool
) -> tuple[str, Iterator[bytes]]:
    """Return the route that a file's lines ask for, and the lines as requests, some at a time.

    `name` names the file in errors. With `texts` each line is a text for `model` (None: the default one), whatever it looks like.
    `endpoint` is the route; None for that of the first request, and completions for texts.

    Raises BulkError if the file is empty or not UTF-8, or looks like requests and has none. Iterating the lines raises it, too.
    """
    begin = file.read(len(_BOM))
    if begin.startswith(_OTHER_BOMS):
        raise BulkError(f"{name} {_UTF_16}")
    start = len(_BOM) if begin == _BOM else 0
    file.seek(start)
    head = list(itertools.islice(((at, line) for at, line in enumerate(file, 1) if line.strip()), LOOKED_AT))
    if not head:
        raise BulkError(f"{name} has no line: each line is a text, or a request in JSON")
    for number, line in head:
        if b"\0" in line:
            raise BulkError(f"{name}, line {number}, has a zero octet. If the file {_UTF_16}")
    requests = [] if texts else [request for _, line in head if (request := _request(line)) is not None]
    file.seek(start)
    if requests:
        return endpoint or _endpoint(requests), iter(lambda: file.read(PIECE), b"")
    if not texts and (number := next((at for at, line in head if line.lstrip().startswith(b"{")), 0)):
        raise BulkError(
            f"{name}, line {number}, begins like JSON, and no line near it is a request: that has `custom_id`, `method`, "
            "`url` and `body`. Mend the file, or say --texts if each line is a text for the model"
        )
    endpoint = endpoint or COMPLETIONS
    return endpoint, _made(file, name, model, endpoint)


def _request(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line that is meant as a request, whatever is wrong with it."""
    try:
        parsed = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_request = isinstance(parsed, dict) and ("custom_id" in parsed or isinstance(parsed.get("body"), dict))
    return parsed if is_request else None


def _endpoint(requests: Sequence[dict[str, Any]]) -> str:
    """Return the route of the first request with a known one."""
    return next((request["url"] for request in requests if request.get("url") in ENDPOINTS), COMPLETIONS)


def _made(file: IO[bytes], name: str, model: str | None, endpoint: str) -> Iterator[bytes]:
    """Make requests of texts."""
    lines: list[bytes] = []
    size = 0
    for number, raw in enumerate(file, 1):
        request = b""  # Blank lines stay, so that both files have the same line numbers.
        if raw.strip():
            try:
                text = raw.rstrip(b"\r\n").decode()
            except UnicodeDecodeError:
                raise BulkError(f"{name}, line {number}, is not UTF-8") from None
            body = {**({"model": model} if model else {}), **_input(text, endpoint)}
            asked = {"custom_id": str(number), "method": "POST", "url": endpoint, "body": body}
            request = msgspec.json.encode(asked)
        lines.append(request + b"\n")
        size += len(lines[-1])
        if size >= PIECE:
            yield b"".join(lines)
            lines, size = [], 0
    yield b"".join(lines)


def _input(text: str, endpoint: str) -> dict[str, Any]:
    """Return the members of a body that hold a text."""
    if endpoint == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    return {"input" if endpoint == EMBEDDINGS else "prompt": text}
