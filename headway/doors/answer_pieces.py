"""Large answers. They are made and sent piece by piece, over several turns of the event loop.

    make ──▶ make ──▶ … ──▶ header ──▶ send ──▶ send ──▶ … ──▶ next request
                                        └── the client reads too slowly: wait until it has read everything ──▶ send

Each piece is quick to make, and an output is freed once its pieces are made. Making a piece may fail, so the whole answer is
made before its first byte is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic

import msgspec

from headway.core import failures, tensor_json, values
from headway.core.failures import error_of
from headway.core.tensors import SIZES, NoTensors, shown_heads, unpack
from headway.errors import BadRequest, RequestError
from headway.gateway.client_quotas import AnswerRoom
from headway.model import Tensors, Value
from headway.oip.tensors import head_of
from headway.runtime.fair_turns import FairTurns

PIECE = 1 << 18  # Size of one piece of a large output, in bytes or characters.

HOLE = secrets.token_hex(16)  # Placeholder for an output that is written in pieces. Random, so no output contains it.

ELSEWHERE = "the Open Inference Protocol has it (`binary_data`, at /v2/models/MODEL/infer)"
"""End of the error message about an output that JSON can't represent."""

_encode = msgspec.json.Encoder().encode


def released(outputs: Sequence[Value]) -> Iterator[Value]:
    """Yield outputs in order, dropping each reference so that an output is freed once it has been written."""
    remaining = list(reversed(outputs))
    del outputs
    while remaining:
        yield remaining.pop()


def cut(content: bytes | memoryview) -> Iterator[bytes]:
    """Split bytes into pieces."""
    if len(content) <= PIECE:
        yield bytes(content)
        return
    for begin in range(0, len(content), PIECE):
        yield bytes(content[begin : begin + PIECE])


def packed_pieces(elements: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a tensor's elements in binary form."""
    for element in elements:
        yield head_of(element)
        yield from cut(element)


def is_large(output: Value) -> bool:
    """Return True if an output takes long to write. The limit is lower for tensors, because their numbers are converted to JSON."""
    return len(output) > (PIECE // 8 if isinstance(output, Tensors) else PIECE)


def json_pieces(output: Value) -> Iterator[bytes]:
    """Yield an output as JSON. Raises UnicodeEncodeError for a lone surrogate, RequestError for unrepresentable tensors."""
    if isinstance(output, str):
        yield from text_pieces(output)
    elif isinstance(output, Tensors):
        yield from tensor_pieces(output)
    else:
        yield from cut(values.as_json(output))


def items_of(outputs: Sequence[Value]) -> Iterator[Iterator[bytes]]:
    """Yield an iterator of JSON pieces for each output; see `json_pieces`. Error messages say which input the output belongs to."""
    if isinstance(outputs[0], Tensors):  # Then all outputs are tensors, because a model returns one kind of value.
        return map(_placed, released(outputs), itertools.count(), itertools.repeat(len(outputs)))
    return map(json_pieces, released(outputs))


def _placed(output: Value, position: int, count: int) -> Iterator[bytes]:
    try:
        yield from json_pieces(output)
    except RequestError as exc:
        raise RequestError(failures.at_input(position, count, exc.message), code=exc.code, reason=exc.reason) from None


def tensor_pieces(output: Tensors) -> Iterator[bytes]:
    """Yield tensors as nested JSON arrays. Raises RequestError if JSON can't represent them."""
    try:
        yield from tensor_json.pieces(output)
    except NoTensors as exc:
        raise failures.no_json(exc, f": {ELSEWHERE}") from None


def as_octets(output: Tensors) -> bytes | memoryview | None:
    """Return the data of a single tensor of numbers (little-endian, row-major), or None for any other output."""
    tensors = unpack(output)
    return tensors[0].data if len(tensors) == 1 and SIZES[tensors[0].head.datatype] else None


def octets_of_tensors(output: Tensors) -> bytes:
    """Return the bytes of a single tensor of numbers. Raises BadRequest for other tensors."""
    data = as_octets(output)
    if data is None:
        heads = shown_heads([tensor.head for tensor in unpack(output)])
        raise BadRequest(
            f"the output is {heads}; only a single tensor of numbers can be sent as octets; ask for JSON, or use the Open Inference Protocol (/v2)"
        )
    return bytes(data)


def text_pieces(text: str) -> Iterator[bytes]:
    """Yield a JSON string. Raises UnicodeEncodeError for a lone surrogate."""
    if len(text) <= PIECE:
        yield _encode(text)
        return
    yield b'"'
    for begin in range(0, len(text), PIECE):
        yield _encode(text[begin : begin + PIECE])[1:-1]
    yield b'"'


def value_within(document: bytes, output: Value) -> Iterator[bytes]:
    """Yield a JSON document with an output in place of HOLE."""
    head, _, tail = document.partition(b'"%b"' % HOLE.encode())
    yield head
    yield from json_pieces(output)
    yield tail


def array_within(document: bytes, name: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Insert items, each given as JSON pieces, into the empty array `name` of a JSON object. No earlier member may be an object."""
    head, member, tail = document.partition(b'"%b":[' % name.encode())
    yield head + member
    separator = b""
    for item in items:
        yield separator
        yield from item
        separator = b","
    yield tail


TURN = 0.001  # Seconds to spend on making pieces in one turn of the loop. The last piece may take longer.

WORTH_SENDING = 1 << 16  # Minimum average size in bytes for sending pieces separately. Smaller pieces are joined.


class LargeAnswer:
    """The body of a large answer. `room` is the quota for the outputs of a request with several inputs, or None for a single
    input. `length` is the number of bytes made but not yet sent. `total` is the length of the complete body, or 0 until the
    whole body is made. `left_since` is the monotonic time at which the client first left a piece unread, or 0.0."""

    __slots__ = ("_clock", "_made", "_pieces", "_room", "left_since", "length", "total")

    def __init__(
        self, pieces: Iterator[bytes], room: AnswerRoom | None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._pieces, self._room, self._clock = pieces, room, clock
        self._made: deque[bytes] = deque()
        self.length = self.total = 0
        self.left_since = 0.0

    def make(self) -> bool:
        """Make pieces for one turn of the loop. Return True once all are made. Raises RequestError or UnicodeEncodeError if an
        output can't be sent, and RequestError if the answer becomes too large."""
        end = self._clock() + TURN
        new: list[bytes] = []
        whole = True
        for piece in self._pieces:
            new.append(piece)
            if self._clock() > end:
                whole = False
                break
        made = sum(map(len, new))
        self._made += new if made > WORTH_SENDING * len(new) else (b"".join(new),)
        self.length += made
        room = self._room
        if room is None:
            return whole
        if self.length > room.held and (failure := room.hold(self.length)) is not None:
            raise error_of(failure)
        if whole:
            room.shrink(self.length)
        return whole

    def take(self) -> bytes:
        if not self._made:
            return b""
        piece = self._made.popleft()
        self.length -= len(piece)
        if self._room is not None:
            self._room.shrink(self.length)
        return piece

    async def whole(self, turns: FairTurns, tenant: str) -> bytes:
        await self.made(turns, tenant)
        return b"".join(self._made)

    async def made(self, turns: FairTurns, tenant: str) -> None:
        """Make all pieces, in as many of the tenant's turns as necessary."""
        while not self.make():
            await _turn(turns, tenant)

    async def sent(self, turns: FairTurns, tenant: str) -> AsyncGenerator[bytes, None]:
        while self._made:
            yield self.take()
            await _turn(turns, tenant)


async def _turn(turns: FairTurns, tenant: str) -> None:
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    turns.wait(tenant, partial(_begin, turn))
    await turn


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
