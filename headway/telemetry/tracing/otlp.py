"""Spans as bytes of OpenTelemetry's protocol: `ExportTraceServiceRequest` in protobuf's wire format, version 1 of the protocol.

The bytes are written here, field by field, as the libraries that could do so take five times as long or more: see
docs/decisions/0040. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto, which never change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from headway.runtime.spans import Attribute, Attributes, Span, SpanForm, SpanLink

MOST_TEXT = 2048
"""Most characters of an attribute's value, and of the message of an error; the rest is cut off."""

_END = struct.Struct("<BQBQHI")
_LINK_FLAGS = struct.Struct("<BI")
_LINK_IDS = 2 + 16 + 2 + 8
"""Bytes of the ids in a link, with their tags and lengths."""
_DOUBLE = struct.Struct("<d")

_KNOWN, _REMOTE = 0x100, 0x200
"""Flags that say whether a context is another process's: that it is known, and that it is."""
_STATUS_ERROR = b"\x18\x02"
_BEGUN, _ENDED = 0x39, 0x41
_SPAN_FLAGS, _LINK_FLAG = 0x0185, 0x35
_ATTRIBUTE, _OF_LINK, _OF_RESOURCE = b"\x4a", b"\x22", b"\x0a"
"""Tags of an attribute: in a span, in a link, and in the description of the process."""
_STRING = b"\x0a"
_MESSAGE_ID = "messaging.message.id"


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
    resource = _field(b"\x0a", b"".join(_pair(_OF_RESOURCE, name, value) for name, value in attributes))
    return Origin(resource, _field(b"\x0a", _text(b"\x0a", scope) + _text(b"\x12", version)))


def export_request(origin: Origin, spans: Iterable[bytes]) -> bytes:
    """Make the message that carries encoded spans."""
    listed = b"".join([part for span in spans for part in (b"\x12", _size(len(span)), span)])
    return _field(b"\x0a", origin.resource + _field(b"\x12", origin.scope + listed))


def encode_span(span: Span, most_links: int) -> bytes:
    """Encode a span, with at most so many of its links; how many more there were is told."""
    context, form = span.context, span.form
    if not form.encoded:
        form.encoded = _encode_form(form)
    parts = [b"\x0a\x10", context.trace_id, b"\x12\x08", context.span_id, form.encoded]
    if context.state:
        parts.append(_text(b"\x1a", context.state))
    if span.parent:
        parts += (b"\x22\x08", span.parent)
    for name, value in span.attributes:
        parts.append(_pair(_ATTRIBUTE, name, value))
    if span.links:
        _add_links(parts, span.links, most_links)
    if span.error is not None:
        parts.append(_field(b"\x7a", _text(b"\x12", span.error) + _STATUS_ERROR))
    flags = context.flags | (_KNOWN | _REMOTE if span.remote else _KNOWN)
    parts.append(_END.pack(_BEGUN, span.begun, _ENDED, span.ended, _SPAN_FLAGS, flags))
    return b"".join(parts)


def _encode_form(form: SpanForm) -> bytes:
    attributes = b"".join([_pair(_ATTRIBUTE, name, value) for name, value in form.attributes])
    return b"%b\x30%b%b" % (_text(b"\x2a", form.name), bytes((form.kind,)), attributes)


def _add_links(parts: list[bytes], links: Sequence[SpanLink], most: int) -> None:
    for link in links if len(links) <= most else links[:most]:
        context = link.context
        state = _text(b"\x1a", context.state) if context.state else b""
        message = _pair(_OF_LINK, _MESSAGE_ID, link.message) if link.message else b""
        size = _size(_LINK_IDS + len(state) + len(message) + _LINK_FLAGS.size)
        flags = _LINK_FLAGS.pack(_LINK_FLAG, context.flags | _KNOWN | _REMOTE)
        parts += (b"\x6a", size, b"\x0a\x10", context.trace_id, b"\x12\x08", context.span_id, state, message, flags)
    if most < len(links):
        parts += (b"\x70", _size(len(links) - most))


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


def _pair(tag: bytes, name: str, value: Attribute) -> bytes:
    """Attribute as a field."""
    if type(value) is str:
        text = value[:MOST_TEXT].encode("utf-8", "replace")
        return _before_text(tag, name, len(text)) + text
    if isinstance(value, float):
        return _before(tag, name, b"\x21", _DOUBLE.size) + _DOUBLE.pack(value)
    number = _size(int(value) & 0xFFFFFFFFFFFFFFFF)
    return _before(tag, name, b"\x18", len(number)) + number


@lru_cache(maxsize=1024)
def _before_text(tag: bytes, name: str, length: int) -> bytes:
    """Attribute whose value is a text of so many bytes, as a field, up to that text."""
    return _before(tag, name, _STRING + _size(length), length)


@lru_cache(maxsize=1024)
def _before(tag: bytes, name: str, kind: bytes, length: int) -> bytes:
    """Attribute as a field, up to its value of so many bytes. `kind`: what comes before a value of its kind."""
    key, content = _name(name), len(kind) + length
    value = _size(content)
    return b"".join((tag, _size(len(key) + len(value) + content), key, value, kind))


@lru_cache(maxsize=1024)
def _name(name: str) -> bytes:
    """Name of an attribute as a field, and the tag of its value."""
    return _text(b"\x0a", name) + b"\x12"


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text[:MOST_TEXT].encode("utf-8", "replace"))


def _field(tag: bytes, content: bytes) -> bytes:
    return b"".join((tag, _size(len(content)), content))


def _size(number: int) -> bytes:
    """Whole number as protobuf writes it, 7 bits to a byte."""
    if number < 0x4000:
        return _BYTES[number] if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_BYTES = [bytes((number,)) for number in range(0x80)]
