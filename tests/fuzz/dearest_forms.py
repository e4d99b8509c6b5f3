"""The most expensive forms with files: those that take longest to read for their size."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from headway.errors import RequestError
from headway.http.openai.bulk import MOST_PARTS, parts

MOST_HEAD = 8_000
"""Bytes of a part's header, about as many as it may have."""
PIECE = 1 << 18
"""Bytes that come at once, at most."""
SLOW = 0.05
"""Processor seconds for one step: five times what is promised, as machines differ."""
_FIELD = b"content-disposition: form-data"


class Dear(NamedTuple):
    """An expensive form. `name` says what it contains."""

    name: str
    boundary: str
    body: bytes


def _heads() -> Iterator[tuple[str, bytes]]:
    named = _FIELD + b'; name="a"'
    for name, before, piece in [
        ("fields", b"", _FIELD + b"\r\n"), ("spaces", b"content-disposition:", b" "), ("lines", b"", b"content-disposition: \r\n"),
        ("semicolons", _FIELD, b";"), ("letters", _FIELD + b";", b"a"), ("spaces of a parameter", _FIELD + b";a", b" "),
        ("parameters", named, b";a=b"), ("quotes", named, b';a="'), ("backslashes", named + b';a="', b"\\"),
        ("escapes", named + b';a="', b'\\"'), ("open quotes", named, b';a="\\'), ("percents", named + b";filename*=a''", b"%"),
        ("octets", named + b";filename*=a''", b"%e9"), ("wide", named + b';a="', "😀".encode()),
    ]:  # fmt: skip
        yield name, before + piece * ((MOST_HEAD - len(before)) // len(piece))


def forms(size: int = PIECE) -> Iterator[Dear]:
    """Yield forms of about this size: many parts with expensive headers, or one part with expensive content."""
    for name, head in _heads():
        one = b"--b\r\n" + head + b"\r\n\r\nx\r\n"
        yield Dear(name, "b", one * min(max(size // len(one), 1), MOST_PARTS) + b"--b--")
    begun = b"\r\n\r\n".join([_FIELD + b'; name="file"; filename="a"', b""])
    long = "b" * 70
    for name, boundary, piece in [
        ("line ends", "b", b"\r\n"), ("nearly boundaries", long, b"\r\n--" + b"b" * 69), ("dashes", "-" * 70, b"\r\n--" + b"-" * 69)
    ]:  # fmt: skip
        yield Dear(name, boundary, b"--%b\r\n%b" % (boundary.encode(), begun) + piece * (size // len(piece)))


def steps_of(form: Dear) -> Iterator[float]:
    """Yield the processor seconds of each step of reading a form."""

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(form.body), PIECE):
            yield form.body[begin : begin + PIECE]

    async def read() -> None:
        async for part in parts({"content-type": f"multipart/form-data; boundary={form.boundary}"}, pieces()):
            async for _ in part.content:
                pass

    reading, ended = read(), False
    while not ended:
        before = time.thread_time()
        try:
            reading.send(None)
        except (StopIteration, RequestError):
            ended = True
        yield time.thread_time() - before


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, which takes longer the more objects earlier tests left."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(data: bytes) -> None:
    """Check that no step of an expensive form takes long. The first byte picks the form, the next two its size."""
    dear = [*forms(1 + int.from_bytes(data[1:3], "little") * PIECE // (1 << 16))]
    form = dear[int.from_bytes(data[:1], "little") % len(dear)]
    with uncollected():
        took = max(steps_of(form))
    assert took < SLOW, f"{form.name}, {len(form.body)} bytes: a step took {took * 1e3:.0f} ms"


SEEDS = [bytes([kind, 255, 255]) for kind in range(len([*forms()]))]
