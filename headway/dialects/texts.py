"""The plain dialects: a list of texts, bare or under a name.

    list      ["a", "b"]
    inputs    {"inputs": ["a", "b"], "parameters": [{…}, {…}]}, the latter if any request has parameters

The answer is a JSON list of as many texts as there were inputs, or an object that holds one under `outputs`, `results` or
`predictions`. A bare list has no room for parameters; they are not sent. Such an object may tell the tokens of all inputs
together, as `usage` of OpenAI's form or in `metadata` of Headway's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from headway.dialects import json_lists
from headway.dialects.dialect import Dialect, NoOutputs, Remote, RemoteCall
from headway.dialects.json_lists import Json, with_metadata, with_usage
from headway.model import ItemResult, Signature, Value

MEMBERS = ("outputs", "results", "predictions")
"""Members of an object that may hold the list; the first that is there counts."""


_NEITHER = f"neither a list nor an object with one of {', '.join(MEMBERS)}"


class TextList(Dialect, frozen=True):
    """Dialect `list`: the inputs and nothing else."""

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Take the URL as it is."""
        return Remote(url, cls())

    @property
    def signature(self) -> Signature:
        """Texts in and out, and nothing beside them."""
        return Signature(sees=())

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode the inputs as a list."""
        return RemoteCall(msgspec.json.encode(inputs))

    def decode(
        self, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
    ) -> list[ItemResult]:
        """Read a list of texts."""
        return read(body, expected)


class NamedInputs(TextList, frozen=True):
    """Dialect `inputs`: the inputs under that name and, if there are any, their parameters."""

    @property
    def signature(self) -> Signature:
        """Texts in and out."""
        return Signature()

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode an object with the inputs, and one object of parameters for each if one of them has any."""
        if not any(parameters):
            return RemoteCall(msgspec.json.encode({"inputs": inputs}))
        objects = [msgspec.Raw(text or b"{}") for text in parameters]
        return RemoteCall(msgspec.json.encode({"inputs": inputs, "parameters": objects}))


class _Wrapped(msgspec.Struct, gc=False):
    outputs: msgspec.Raw = msgspec.Raw(b"")
    results: msgspec.Raw = msgspec.Raw(b"")
    predictions: msgspec.Raw = msgspec.Raw(b"")
    usage: msgspec.Raw = msgspec.Raw(b"")
    metadata: msgspec.Raw = msgspec.Raw(b"")


_decode_wrapped: Any = msgspec.json.Decoder(_Wrapped).decode
_decode_text: Any = msgspec.json.Decoder(str).decode


def read(body: bytes | bytearray, expected: int) -> list[ItemResult]:
    """Read one item for each of the `expected` inputs. An element that is no text fails that input alone.

    Raises:
        NoOutputs: the body holds another number of outputs.
    """
    try:
        if json_lists.first(body) == "[":
            return _items(body, expected)
        wrapped = _unwrapped(body)
        items = _items(_list_in(wrapped), expected)
        return with_usage(with_metadata(items, wrapped.metadata), wrapped.usage)
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is no JSON ({exc})") from None


def _items(content: Json, expected: int) -> list[ItemResult]:
    try:
        return [ItemResult(text) for text in _texts(expected)(content)]
    except msgspec.ValidationError:
        return [_item(raw) for raw in json_lists.elements(content, expected)]


def _unwrapped(body: bytes | bytearray) -> _Wrapped:
    try:
        found: _Wrapped = _decode_wrapped(body)
    except msgspec.ValidationError:
        raise NoOutputs(_NEITHER) from None
    return found


def _list_in(wrapped: _Wrapped) -> Json:
    """Member that is the list."""
    content: msgspec.Raw = next(
        (raw for member in MEMBERS if memoryview(raw := getattr(wrapped, member))), msgspec.Raw()
    )
    if json_lists.first(content) != "[":
        raise NoOutputs(_NEITHER)
    return content


def _item(raw: msgspec.Raw) -> ItemResult:
    """Item of an element, a failed one if it is no text."""
    if json_lists.first(raw) == '"':
        return ItemResult(_decode_text(raw))
    return json_lists.fault(json_lists.kind(raw), "a string")


@lru_cache(maxsize=128)
def _texts(count: int) -> Any:
    """Decoder of a list of exactly `count` texts."""
    return msgspec.json.Decoder(tuple[(str,) * count]).decode  # type: ignore[misc]
