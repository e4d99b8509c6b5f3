"""The most expensive gRPC messages: those that take longest to read for their size.
Most repeat a small member at some depth, as decoders are slowest on many small members."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.config import Settings
from headway.errors import RequestError
from headway.grpc.methods import PREDICT_READER
from headway.model import RequestOptions, TensorSpec, ValueKind
from headway.oip.grpc.infer_messages import infer_reader
from headway.protos import varint
from tests.fuzz.models import models_of

MOST = 1_000_000
"""Bytes of the largest message, as `max_body_bytes` is by default, with room for what is around the pieces."""
SLOW = 0.08
"""Processor seconds that four models may take together for one message, with room for the garbage collector."""
_SETTINGS, _OPTIONS = Settings(), RequestOptions(4.0)
_READERS = {"infer": infer_reader(_SETTINGS), "predict": PREDICT_READER}


MODELS = (
    {"unknown": models_of()}
    | {kind.value: models_of(kind) for kind in ValueKind}
    | {
        name: models_of(ValueKind.TENSORS, [TensorSpec("x", name, (-1,))])
        for name in ("FP32", "INT64", "INT8", "BOOL", "BYTES")
    }
)
"""Models that are asked, by what they take."""


class Taken(Exception):
    """The message was read and accepted."""


class Dear(NamedTuple):
    """An expensive message. `name` says what it contains, `taken` whether some model accepts it."""

    name: str
    method: str
    body: bytes
    taken: bool = False

    def steps(self, model: str) -> Iterator[int]:
        """Read it for a model, in steps. The last step raises Taken or RequestError."""
        read = _READERS[self.method].in_steps
        assert read is not None
        yield from read(self.body, _OPTIONS, MODELS[model])
        raise Taken

    def read(self, model: str) -> bool:
        """Read it for a model. Returns whether the model accepts it."""
        try:
            for _ in self.steps(model):
                pass
        except RequestError as exc:
            assert len(exc.message) < 1000
            return False
        except Taken:
            return True
        raise AssertionError("it is neither taken nor refused")


def field(number: int, content: bytes = b"") -> bytes:
    """Encode a member with a length prefix."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(datatype: bytes, shape: Sequence[int], contents: bytes = b"", raw: bytes | None = None) -> bytes:
    """Encode a ModelInfer request with one input."""
    packed = b"".join(map(varint, shape))
    head = field(1, b"x") + field(2, datatype) + field(3, packed)
    return field(5, head + contents) + (b"" if raw is None else field(7, raw))


def typed(datatype: bytes, count: int, number: int, content: bytes, piece: bool = False) -> bytes:
    """Encode a request with one row of `count` elements, which are packed, or separate members if `piece`."""
    return tensor(datatype, [1, count], field(5, content * count if piece else field(number, content * count)))


def _members(size: int) -> Iterator[Dear]:
    """Yield messages with many members where few or none are allowed."""
    pieces = {"empty": b"", "entry": field(1, b"a"), "entries": field(2), "contents": field(5)}
    for name, piece in pieces.items():
        for number in (2, 5, 7):
            member = field(number, piece)
            members = member * (size // len(member))
            yield Dear(f"{name} members of {number}", "infer", members)
            for outer in (4, 5, 6):
                yield Dear(f"{name} members of {number} in {outer}", "infer", field(outer, members))
                each = field(outer, member)
                yield Dear(f"{outer}s of a member of {number}, {name}", "infer", each * (size // len(each)))
    for name, piece in {"numbers": b"\x98\x06\x01", "groups": b"\x9b\x06\x9c\x06", "fixed": b"\x9d\x06abcd"}.items():
        yield Dear(f"unknown {name}", "infer", piece * (size // len(piece)))
        yield Dear(f"unknown {name} in contents", "infer", field(5, field(5, piece * (size // len(piece)))))
    keys = b"".join(field(4, field(1, b"%06x" % number)) for number in range(size // 10))
    yield Dear("parameters", "infer", keys)
    yield Dear("parameters of an input", "infer", field(5, keys))
    yield Dear("values in a parameter", "infer", field(4, field(2, field(3) * (size // 2))))
    text = field(4, field(1, b"p") + field(2, field(3, b"\x01" * size)))
    yield Dear("parameter of control characters", "infer", text + tensor(b"BYTES", [1], field(5, field(8, b"a"))))


def _shapes(size: int) -> Iterator[Dear]:
    for datatype in (b"FP32", b"BYTES"):
        yield Dear(f"axes of {datatype.decode()}", "infer", tensor(datatype, [1] * size, raw=bytes(4)))
    yield Dear("axes one by one", "infer", field(5, b"\x18\x01" * (size // 2)))
    yield Dear("short message of axes", "infer", field(5, b"\x18\x01" * min(size // 2, 8000)))
    yield Dear("claimed elements", "infer", tensor(b"BYTES", [1, 65_536], raw=b""))
    yield Dear("claimed numbers", "infer", tensor(b"FP32", [1, 1 << 40], raw=bytes(4)))


def _data(size: int) -> Iterator[Dear]:
    """Yield tensors with many elements. `member` holds them, and `apart` makes each a separate member."""
    integers, elements = min(size, 1 << 18), min(size // 5, 1 << 16)
    long = b"\xfd" + b"\xff" * 8 + b"\x01"
    for name, datatype, count, member, content, apart, taken in (
        ("numbers", b"FP32", size // 4, 6, bytes(4), False, True),
        ("numbers one by one", b"FP32", size // 5, 6, b"\x35\0\0\0\0", True, True),
        ("booleans", b"BOOL", size, 1, b"\x01", False, True),
        ("small integers", b"INT8", integers, 2, b"\x01", False, True),
        ("integers one by one", b"INT8", min(integers, size // 2), 2, b"\x10\x01", True, True),
        ("long integers", b"INT8", min(integers, size // 10), 2, long, False, True),
        ("large integers", b"INT64", min(integers, size // 8), 3, b"\x01", False, True),
        ("integers beyond the bound", b"INT8", size, 2, b"\x01", False, size <= 1 << 18),
        ("wrong integers", b"INT8", min(integers, size // 2), 2, b"\xff\x01", False, False),
        ("elements", b"BYTES", elements, 8, field(8, b"a"), True, True),
        ("empty elements", b"BYTES", elements, 8, field(8), True, True),
        ("elements beyond the bound", b"BYTES", size // 2, 8, field(8), True, size >> 1 <= 1 << 16),
    ):
        yield Dear(name, "infer", typed(datatype, count, member, content, apart), taken)
    raw = b"\1\0\0\0a" * elements
    yield Dear("raw numbers", "infer", tensor(b"FP32", [1, size // 4], raw=bytes(size // 4 * 4)), taken=True)
    yield Dear("raw elements", "infer", tensor(b"BYTES", [1, elements], raw=raw), taken=True)
    texts = field(5, field(8, b"a" * (size // 1024 - 8)) * 1024)
    yield Dear("texts", "infer", tensor(b"BYTES", [1024], texts), taken=True)
    yield Dear("one text", "infer", tensor(b"BYTES", [1], field(5, field(8, "é".encode() * (size // 2)))), taken=True)


def _predictions(size: int) -> Iterator[Dear]:
    for name, piece in {
        "numbers": b"1",
        "fractions": b"0.1",
        "long numbers": b"0.12345678901234567",
        "empty rows": b"[]",
        "rows": b"[1]",
        "texts": b'""',
        "objects": b"{}",
        "extremes": b"1e-400",
    }.items():
        text = b"[" + b",".join([piece] * (size // (len(piece) + 1))) + b"]"
        yield Dear(f"array of {name}", "predict", field(2, text), taken=True)
    yield Dear("text", "predict", field(2, "é".encode() * (size // 2)), taken=True)
    yield Dear("text with U+0000 at its end", "predict", field(2, b"a" * (size - 1) + b"\0"), taken=True)
    yield Dear("small members", "predict", field(1) * (size // 2), taken=True)


def calls(size: int = MOST) -> Iterator[Dear]:
    """Yield expensive messages of all kinds, of about this size."""
    yield from _members(size)
    yield from _shapes(size)
    yield from _data(size)
    yield from _predictions(size)


def draw(rng: random.Random) -> bytes:
    """Draw a ModelInfer request: a small piece, repeated at some depth, perhaps after a valid start."""
    tag = varint(rng.choice((*range(1, 9), 99)) << 3 | (kind := rng.choice((0, 1, 2, 2, 2, 5))))
    piece = (
        tag + {0: b"\x01", 1: bytes(8), 2: varint(length := rng.randrange(4)) + b"\x0a\0a"[:length], 5: bytes(4)}[kind]
    )
    body = piece * (int(MOST ** rng.uniform(0.3, 1.0)) // len(piece))
    for number in rng.choice(
        ((), (5,), (5, 5), (5, 4), (6,), (6, 2), (4,), (4, 2), (7,), (5, 3), (5, 5, 2), (5, 5, 8))
    )[::-1]:
        body = field(number, body)
    good = rng.choice((b"", tensor(b"FP32", [1, 1], raw=bytes(4)), tensor(b"BYTES", [1], field(5, field(8, b"a")))))
    return good + body


def check(data: bytes) -> None:
    """Check that all sorts of models accept or refuse a message."""
    for model in ("unknown", "text", "BYTES", "INT8"):
        Dear("drawn", "infer", data).read(model)
