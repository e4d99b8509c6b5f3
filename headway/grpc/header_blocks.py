"""Header blocks: HPACK for a server that writes few fields and often reads the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import cast

from hpack import Decoder
from hpack.exceptions import HPACKDecodingError
from hpack.hpack import encode_integer

Headers = Sequence[tuple[bytes, bytes]]

_STATUS_OK = b"\x88"  # `:status: 200` in HPACK's static table.
_OK = (":status", "200")
_INDEXED = bytes(range(0x81, 0xFF))  # Octets that each represent a complete field, and don't change the table.
_RESIZED = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\0-\x7f]){3}")
"""Three changes of the table's size. Two are always enough (RFC 7541, section 4.2)."""
_SHORT = [bytes(encode_integer(size, 7)) for size in range(256)]  # HPACK's encoding of small lengths, by length.
_MOST_KNOWN = 8
_ENTRY = 32  # Number of bytes that HTTP/2 counts for a header field in addition to its name and value.
_NAMES = re.compile(rb"(?::?[a-z0-9_.-]+(?:,:?[a-z0-9_.-]+)*)?")
_ILLEGAL = re.compile(rb"[\0-\x08\x0a-\x1f\x7f]")  # Octets that are forbidden in the value of a header field.
_PSEUDO = ([b":authority", b":method", b":path", b":scheme"], [b":method", b":path", b":scheme"])
_HOPS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
"""HTTP/1.1 header fields about the connection, which HTTP/2 forbids."""


def block_of(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode fields so that the client doesn't add them to its table."""
    return b"".join([_STATUS_OK if field == _OK else _field(*field) for field in headers])


class RequestFields:
    """The header fields of a request. `fields` has the last value for each name. `size` is the size of the fields as counted by
    HTTP/2, or that of the encoded block if it is larger. `pseudo` is the number of fields whose names begin with a colon.
    `misnamed` is True if HTTP/2 forbids one of the names (RFC 9113, section 8.2). `malformed` is True if `misnamed` is True, or
    the fields violate a rule for requests (section 8.3). `illegal` is True if a value contains a forbidden octet. `usual`
    caches what a call has read from the fields, for later calls with the same fields."""

    __slots__ = ("fields", "headers", "illegal", "malformed", "misnamed", "pseudo", "size", "usual")

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.usual: object = None
        names = [name for name, _ in headers]
        joined, values = b",".join(names), b"\t".join([value for _, value in headers])
        self.fields = fields = dict(headers)
        self.size = len(joined) + len(values) + (_ENTRY - 2) * len(names) + 2
        self.pseudo = joined.count(b":")
        self.misnamed = not _NAMES.fullmatch(joined) or not _HOPS.isdisjoint(fields)
        self.malformed = (
            self.misnamed
            or sorted(names[: self.pseudo]) not in _PSEUDO
            or not fields[b":path"]
            or fields.get(b"te", b"trailers") != b"trailers"
        )
        self.illegal = _ILLEGAL.search(values) is not None


class HeaderReader(Decoder):
    """A decoder that caches blocks consisting only of references to the table. A block's fields may take up to `most` bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(max_header_list_size=most)
        self._known: dict[bytes, RequestFields] = {}

    def read(self, block: bytes) -> RequestFields:
        """Decode a block. Raises HPACKError."""
        head = self._known.get(block)
        if head is None:
            if _RESIZED.match(block):
                raise HPACKDecodingError("the table size changes repeatedly")
            head = RequestFields(cast(Headers, self.decode(block, raw=True)))
            head.size = max(head.size, len(block))
            if block.translate(None, _INDEXED) or len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            else:
                self._known[block] = head
        return head


def _field(name: str, value: str) -> bytes:
    octets = value.encode()
    return b"%b%b%b" % (_named(name), _length(octets), octets)


@lru_cache(maxsize=256)
def _named(name: str) -> bytes:
    octets = name.encode()
    return b"\0%b%b" % (_length(octets), octets)


def _length(octets: bytes) -> bytes:
    size = len(octets)
    return _SHORT[size] if size < len(_SHORT) else bytes(encode_integer(size, 7))
