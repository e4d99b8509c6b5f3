"""Elements of a tensor, to values and from values, by the kind that a model takes or gives.

    kind    an element of the input, and of the output
    text    the text, in UTF-8
    bytes   the octets themselves
    json    the JSON text of the value, in UTF-8

While the kind is not known, as no worker has been seen yet, an element is a text.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Sequence

import msgspec

from headway.core import values
from headway.errors import BadRequest
from headway.model import Octets, Value, ValueKind

Element = str | bytes
"""Element of an input: a text out of JSON, or the octets of the binary form."""


def values_of(elements: Sequence[Element], takes: ValueKind | None) -> list[Value]:
    """Values of the elements of an input, for a model that takes values of a kind.

    Raises:
        BadRequest: an element is no such value; the message says which.
    """
    found: list[Value] = []
    try:
        for element in elements:
            found.append(_value_of(element, takes))
    except BadRequest as exc:
        raise BadRequest(f"element {len(found)} of the input {exc}") from None
    return found


def element_of(output: Value, gives: ValueKind | None) -> bytes:
    """Element of an output, for a model that gives values of a kind.

    Raises:
        UnicodeEncodeError: the output holds a lone surrogate.
    """
    if isinstance(output, Octets):
        return output.content
    if gives is ValueKind.JSON:
        return values.as_json(output)
    if gives is ValueKind.BYTES and isinstance(output, str):
        try:
            return b64decode(output, validate=True)
        except (binascii.Error, ValueError):  # It comes from a worker that gives texts, as a fleet in change may have.
            pass
    return output.encode() if isinstance(output, str) else output


def _value_of(element: Element, takes: ValueKind | None) -> Value:
    if takes is ValueKind.BYTES:
        return Octets(element.encode() if isinstance(element, str) else element)
    if takes is ValueKind.JSON:
        return _json_value(element.encode() if isinstance(element, str) else element)
    if isinstance(element, bytes):
        try:
            element = element.decode()
        except UnicodeDecodeError as exc:
            raise BadRequest(f"is not UTF-8: {exc.reason} at byte {exc.start}; the model takes texts") from None
    if "\0" in element:
        raise BadRequest("contains U+0000, which not every model can hold; remove it")
    return element


def _json_value(text: bytes) -> Value:
    try:
        return values.read(text)
    except values.NoValue as exc:
        raise BadRequest(str(exc)) from None
    except UnicodeDecodeError as exc:
        raise BadRequest(f"is not UTF-8: {exc.reason} at byte {exc.start}; the model takes JSON texts") from None
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise BadRequest(f"is no JSON text, which the model takes: {exc}") from None
