"""The answer of a remote API, read with bounds.

It is a JSON list of as many outputs as there were inputs, or an object that holds one under `outputs`, `results` or
`predictions`. It is decoded as exactly that, so that a body of other things costs next to nothing: reading stops at the
first element too many, and what nobody asked for is skipped, not built.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from headway.backends.process.frames import MAX_OUTPUT
from headway.model import ItemResult

MEMBERS = ("outputs", "results", "predictions")
"""Members of an object that may hold the list; the first that is there counts."""
_COUNTED = 1 << 20
"""Bytes of a list of another length up to which its elements are counted, for the error's text."""
_KINDS = {"n": "null", "t": "bool", "f": "bool", "[": "list", "{": "dict"}


class NoOutputs(Exception):
    """The body is no list of as many outputs as inputs. The text quotes nothing of it."""


class _Wrapped(msgspec.Struct, gc=False):
    outputs: msgspec.Raw = msgspec.Raw(b"")
    results: msgspec.Raw = msgspec.Raw(b"")
    predictions: msgspec.Raw = msgspec.Raw(b"")


_decode_wrapped: Any = msgspec.json.Decoder(_Wrapped).decode
_decode_text: Any = msgspec.json.Decoder(str).decode
_decode_any_list: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode


def read(body: bytes | bytearray, expected: int) -> list[ItemResult]:
    """Read one item for each of the `expected` inputs. An element that is no text fails that input alone.

    Raises:
        NoOutputs: the body holds another number of outputs.
    """
    try:
        content = _list_in(body)
        try:
            return [_item(text) for text in _texts(expected)(content)]
        except msgspec.ValidationError:
            return [_item(_text_of(raw)) for raw in _raws(expected)(content)]
    except msgspec.ValidationError:
        raise NoOutputs(_other_length(content, expected)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NoOutputs(f"something that is no JSON ({exc})") from None


def _list_in(body: bytes | bytearray) -> bytes | bytearray | msgspec.Raw:
    """Part of the body that is the list."""
    if _first(body) == "[":
        return body
    neither = f"neither a list nor an object with one of {', '.join(MEMBERS)}"
    try:
        wrapped = _decode_wrapped(body)
    except msgspec.ValidationError:
        raise NoOutputs(neither) from None
    content: msgspec.Raw = next(
        (raw for member in MEMBERS if memoryview(raw := getattr(wrapped, member))), msgspec.Raw()
    )
    if _first(content) != "[":
        raise NoOutputs(neither)
    return content


def _first(content: bytes | bytearray | msgspec.Raw) -> str:
    """First character that is no space; empty for a body that begins with many spaces."""
    return bytes(memoryview(content)[:64]).lstrip()[:1].decode("latin-1")


def _other_length(content: bytes | bytearray | msgspec.Raw, expected: int) -> str:
    if len(memoryview(content)) > _COUNTED:
        return f"another number of outputs than {expected}, for {expected} inputs"
    return f"{len(_decode_any_list(content))} outputs for {expected} inputs"


def _item(output: str | ItemResult) -> ItemResult:
    if isinstance(output, ItemResult):
        return output
    if len(output) > MAX_OUTPUT:
        return ItemResult(None, f"the remote API answered {len(output)} characters, the limit is {MAX_OUTPUT}", True)
    return ItemResult(output)


def _text_of(raw: msgspec.Raw) -> str | ItemResult:
    """Text of an element, or a failed item for an element that is none."""
    first = _first(raw)
    if first == '"':
        text: str = _decode_text(raw)
        return text
    kind = _KINDS.get(first, "number")
    return ItemResult(None, f"the remote API answered {kind} for this input, expected a string", True)


@lru_cache(maxsize=128)
def _texts(count: int) -> Any:
    """Decoder of a list of exactly `count` texts."""
    return msgspec.json.Decoder(tuple[(str,) * count]).decode  # type: ignore[misc]


@lru_cache(maxsize=128)
def _raws(count: int) -> Any:
    """Decoder of a list of exactly `count` elements, whatever they are."""
    return msgspec.json.Decoder(tuple[(msgspec.Raw,) * count]).decode  # type: ignore[misc]
