"""The plain dialects: a list of texts, bare or under a name.

    list      ["a", "b"]
    inputs    {"inputs": ["a", "b"], "parameters": [{…}, {…}]}, with `parameters` if any request has some

The answer is a JSON list of as many texts as there were inputs, or an object that holds such a list as `outputs`, `results`
or `predictions`. A bare list has no room for parameters, so they are not sent. An object may also report the tokens of the
whole batch, as OpenAI's `usage` or Headway's `metadata`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from headway.dialects import json_lists
from headway.dialects.dialect import Body, Dialect, NoOutputs, Remote, RemoteCall
from headway.dialects.json_lists import Json, with_metadata, with_usage
from headway.model import ItemResult, Signature, Value

MEMBERS = ("outputs", "results", "predictions")
"""Members that may hold the list, of which the first one present counts."""
_NEITHER = f"neither a list nor an object with one of {', '.join(MEMBERS)}"


class TextList(Dialect, frozen=True):
    """Dialect `list`, with nothing but the inputs."""

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        return Remote(url, cls())

    @property
    def signature(self) -> Signature:
        return Signature(sees=())

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        return RemoteCall(msgspec.json.encode(inputs))

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        return read(body, expected)


class NamedInputs(TextList, frozen=True):
    """Dialect `inputs`, with the inputs, and their parameters if any input has some."""

    @property
    def signature(self) -> Signature:
        return Signature()

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
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


def read(body: Body, expected: int) -> list[ItemResult]:
    """Read one result for each input; see `Dialect.decode`."""
    try:
        if json_lists.first(body) == "[":
            return _items(body, expected)
        wrapped = _unwrapped(body)
        items = _items(_list_in(wrapped), expected)
        return with_usage(with_metadata(items, wrapped.metadata), wrapped.usage)
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None


def _items(content: Json, expected: int) -> list[ItemResult]:
    try:
        return [ItemResult(text) for text in _texts(expected)(content)]
    except msgspec.ValidationError:
        return [_item(raw) for raw in json_lists.elements(content, expected)]


def _unwrapped(body: Body) -> _Wrapped:
    try:
        wrapped: _Wrapped = _decode_wrapped(body)
    except msgspec.ValidationError:
        raise NoOutputs(_NEITHER) from None
    return wrapped


def _list_in(wrapped: _Wrapped) -> Json:
    content: msgspec.Raw = next(
        (raw for member in MEMBERS if memoryview(raw := getattr(wrapped, member))), msgspec.Raw()
    )
    if json_lists.first(content) != "[":
        raise NoOutputs(_NEITHER)
    return content


def _item(raw: msgspec.Raw) -> ItemResult:
    if json_lists.first(raw) == '"':
        return ItemResult(_decode_text(raw))
    return json_lists.fault(json_lists.kind(raw), "a string")


@lru_cache(maxsize=128)
def _texts(count: int) -> Any:
    return msgspec.json.Decoder(tuple[(str,) * count]).decode  # type: ignore[misc]
