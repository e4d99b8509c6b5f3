"""Spans as bytes of OpenTelemetry's protocol: `ExportTraceServiceRequest` in protobuf's wire format, version 1 of the protocol.

The bytes are written here, field by field, as the libraries that could do so take five times as long or more: see
docs/decisions/0040. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto, which never change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from headway.runtime.spans import Attribute, Attributes, Span, SpanLink

MOST_TEXT = 2048
"""Most characters of an attribute's value, and of the message of an error; the rest is cut off."""

_TIMES = struct.Struct("<BQBQ")
_FLAGS = struct.Struct("<HI")
_LINK_FLAGS = struct.Struct("<BI")
_DOUBLE = struct.Struct("<Bd")

_KNOWN, _REMOTE = 0x100, 0x200
"""Flags that say whether a context is another process's: that it is known, and that it is."""
_STATUS_ERROR = b"\x18\x02"
_BEGUN, _ENDED = 0x39, 0x41
_SPAN_FLAGS, _LINK_FLAG = 0x0185, 0x35


class Origin(NamedTuple):
    """Part of all messages that says where spans come from: the process, and what records them, each as a field."""

    resource: bytes
    scope: bytes


def origin_of(attributes: Attributes, scope: str, version: str) -> Origin:
    """Make the part of all messages that says where spans come from.

    Arguments:
        attributes: attributes of the process.
        scope: name of the recorder.
        version: version of the recorder.
    """
    resource = _field(0x0A, b"".join(_pair(0x0A, name, value) for name, value in attributes))
    return Origin(resource, _field(0x0A, _text(0x0A, scope) + _text(0x12, version)))


def export_request(origin: Origin, spans: Iterable[bytes]) -> bytes:
    """Make the message that carries encoded spans."""
    listed = b"".join([b"\x12" + _size(len(span)) + span for span in spans])
    return _field(0x0A, origin.resource + _field(0x12, origin.scope + listed))


def encode_span(span: Span, most_links: int) -> bytes:
    """Encode a span, with at most so many of its links; how many more there were is told."""
    context = span.context
    parts = [b"\x0a\x10", context.trace_id, b"\x12\x08", context.span_id]
    if context.state:
        parts.append(_text(0x1A, context.state))
    if span.parent:
        parts += (b"\x22\x08", span.parent)
    parts += (_text(0x2A, span.name), b"\x30", bytes((span.kind,)), _TIMES.pack(_BEGUN, span.begun, _ENDED, span.ended))
    parts += [_pair(0x4A, name, value) for name, value in span.attributes]
    links = span.links if len(span.links) <= most_links else span.links[:most_links]
    parts += [_link(link) for link in links]
    if len(links) < len(span.links):
        parts += (b"\x70", _size(len(span.links) - len(links)))
    if span.error is not None:
        parts.append(_field(0x7A, _text(0x12, span.error) + _STATUS_ERROR))
    remote = _KNOWN | _REMOTE if span.remote else _KNOWN
    parts.append(_FLAGS.pack(_SPAN_FLAGS, context.flags | remote))
    return b"".join(parts)


def read_partial_success(body: bytes) -> tuple[int, str]:
    """Read a collector's answer: how many spans it has rejected, and what it says of that.

    Raises:
        ValueError: the bytes are no answer of a collector's.
    """
    rejected, message = 0, ""
    for number, content in _fields(body):
        if number == 1 and isinstance(content, bytes):
            for inner, value in _fields(content):
                if inner == 1 and isinstance(value, int):
                    rejected = value if value < 1 << 63 else 0
                elif inner == 2 and isinstance(value, bytes):
                    message = value.decode("utf-8", "replace")
    return rejected, message


def _fields(body: bytes) -> Iterable[tuple[int, int | bytes]]:
    """Fields of a message: their numbers and contents."""
    at = 0
    while at < len(body):
        key, at = _number(body, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(body, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _number(body, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field type {kind}")
        if at + size > len(body):
            raise ValueError("cut short")
        yield key >> 3, body[at : at + size]
        at += size


def _number(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(body):
            raise ValueError("cut short")
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number is too long")


def _link(link: SpanLink) -> bytes:
    context = link.context
    inner = b"\x0a\x10%b\x12\x08%b" % (context.trace_id, context.span_id)
    if context.state:
        inner += _text(0x1A, context.state)
    if link.message:
        inner += _pair(0x22, "messaging.message.id", link.message)
    inner += _LINK_FLAGS.pack(_LINK_FLAG, context.flags | _KNOWN | _REMOTE)
    return b"\x6a" + _size(len(inner)) + inner


def _pair(tag: int, name: str, value: Attribute) -> bytes:
    """Attribute as a field."""
    if type(value) is str:
        content = _text(0x0A, value)
    elif isinstance(value, float):
        content = _DOUBLE.pack(0x21, value)
    else:
        content = b"\x18" + _size(int(value) & 0xFFFFFFFFFFFFFFFF)
    inner = _name(name) + _size(len(content)) + content
    return bytes((tag,)) + _size(len(inner)) + inner


@lru_cache(maxsize=1024)
def _name(name: str) -> bytes:
    """Name of an attribute as a field, and the tag of its value."""
    return _text(0x0A, name) + b"\x12"


def _text(tag: int, text: str) -> bytes:
    content = text[:MOST_TEXT].encode("utf-8", "replace")
    return bytes((tag,)) + _size(len(content)) + content


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + _size(len(content)) + content


def _size(number: int) -> bytes:
    """Whole number as protobuf writes it, 7 bits to a byte."""
    if number < 0x80:
        return _BYTES[number]
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_BYTES = [bytes((number,)) for number in range(0x80)]
