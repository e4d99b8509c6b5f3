"""Each dialect by name, and the choice of a dialect for a URL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.dialects import AUTO, json_lists
from headway.dialects.dialect import Body, Dialect, NoOutputs, Remote, RemoteCall
from headway.dialects.json_lists import Json, with_metadata, with_usage
from headway.dialects.openai import Completions, Embeddings
from headway.errors import SettingError
from headway.model import ItemResult, Signature, Value
from headway.oip.dialect_grpc import OpenInferenceGrpc
from headway.oip.dialect_rest import OpenInferenceHttp

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


DIALECTS: Mapping[str, type[Dialect]] = {
    "list": TextList,
    "inputs": NamedInputs,
    "oip": OpenInferenceHttp,
    "oip-grpc": OpenInferenceGrpc,
    "openai-completions": Completions,
    "openai-embeddings": Embeddings,
}


def reach(url: str, name: str = AUTO, model: str = "") -> Remote:
    """Return the API at a URL without credentials, in the dialect `name` or AUTO. `model` is the remote model's name, or empty.
    Raises SettingError if the URL or a setting doesn't fit the dialect."""
    parts = urlsplit(url)
    chosen = _implied_by(parts.scheme, parts.path) if name == AUTO else name
    kind = DIALECTS[chosen]
    if parts.scheme not in kind.schemes:
        hint = f"Use a URL of {' or '.join(f'{scheme}://' for scheme in kind.schemes)}, or leave it out."
        raise SettingError("remote_format", name, f"is not spoken over {parts.scheme}://", hint)
    return kind.reach(url, model)


def _implied_by(scheme: str, path: str) -> str:
    kinds = {name: kind for name, kind in DIALECTS.items() if scheme in kind.schemes}
    if scheme not in Dialect.schemes and kinds:
        return next(iter(kinds))
    if re.fullmatch(".*/chat/completions/?", path):
        hint = "Name its …/v1/completions, which takes a list of prompts."
        reason = f"finds no dialect for {path}, because that path takes a single conversation per request"
        raise SettingError("remote_format", AUTO, reason, hint)
    return next((name for name, kind in kinds.items() if kind.path and re.fullmatch(kind.path, path)), "list")
