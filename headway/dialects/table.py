"""Table of all dialects, the choice of a dialect for a URL, and the dialects for plain JSON and for OpenAI's API.

In OpenAI's dialects, an output is a choice's text, or the JSON text of an embedding exactly as the API wrote it. Parameters
apply to the whole request. Parameters that would change the number or the form of the outputs are not sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from headway.core.excerpt import excerpt
from headway.dialects import AUTO
from headway.dialects.dialect import (
    NO_JSON,
    Body,
    Dialect,
    Json,
    NoOutputs,
    Remote,
    RemoteCall,
    elements,
    fault,
    first_character,
    kind_of,
    needs_model,
    raw_members,
    with_metadata,
    with_usage,
)
from headway.errors import SettingError
from headway.model import ItemResult, Signature, Value, ValueKind
from headway.oip.dialect_grpc import OpenInferenceGrpc
from headway.oip.dialect_rest import OpenInferenceHttp

_NO_COMPLETION = frozenset(("model", "prompt", "messages", "n", "best_of", "stream", "stream_options"))
"""Parameters that are never sent with prompts. The `messages` are already part of the prompt."""
_NO_EMBEDDING = frozenset(("model", "input", "encoding_format"))
_NUMBERS = "a list of numbers"


class _Model(msgspec.Struct, gc=False):
    id: str


class _Models(msgspec.Struct, gc=False):
    data: list[_Model]


class _Numbered(msgspec.Struct, gc=False):
    index: int


class _Choices(msgspec.Struct, gc=False):
    choices: msgspec.Raw
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct, gc=False):
    text: str


class _Data(msgspec.Struct, gc=False):
    data: msgspec.Raw
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Embedding(msgspec.Struct, gc=False):
    embedding: msgspec.Raw


_decode_models: Any = msgspec.json.Decoder(_Models).decode
_decode_index: Any = msgspec.json.Decoder(_Numbered).decode
_decode_choices: Any = msgspec.json.Decoder(_Choices).decode
_decode_choice: Any = msgspec.json.Decoder(_Choice).decode
_decode_data: Any = msgspec.json.Decoder(_Data).decode
_decode_embedding: Any = msgspec.json.Decoder(_Embedding).decode
_check_numbers: Any = msgspec.json.Decoder(list[float]).decode


class NamedModel(Dialect, frozen=True):
    """Base class of the `openai-…` dialects: `POST /v1/completions` or `/v1/embeddings` with a list of texts."""

    name: ClassVar[str] = ""
    shared_parameters: ClassVar[bool] = True
    model: str

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Accept any URL. If its path looks like OpenAI's, models are listed at `/v1/models`."""
        parts = urlsplit(url)
        match = re.fullmatch("(.*/v1)/(completions|embeddings)", parts.path)
        models = None if match is None else RemoteCall(b"", {}, parts._replace(path=f"{match[1]}/models").geturl())
        return Remote(url, cls(needs_model(cls.name, model)), models=models, model=model)

    def models(self, answer: Body) -> list[str]:
        try:
            return [model.id for model in _decode_models(answer).data]
        except (*NO_JSON, msgspec.ValidationError):
            return []


class Completions(NamedModel, frozen=True):
    """Texts in, texts out."""

    name: ClassVar[str] = "openai-completions"
    path: ClassVar[str] = ".*/v1/completions"

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        return _shared_request({"model": self.model, "prompt": inputs}, parameters, _NO_COMPLETION)

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        return _indexed_items(body, "choices", _decode_choices, expected, _choice)


class Embeddings(NamedModel, frozen=True):
    """Texts in, lists of numbers out."""

    name: ClassVar[str] = "openai-embeddings"
    path: ClassVar[str] = ".*/v1/embeddings"

    @property
    def signature(self) -> Signature:
        return Signature(gives=ValueKind.JSON)

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        own = {"model": self.model, "input": inputs, "encoding_format": "float"}
        return _shared_request(own, parameters, _NO_EMBEDDING)

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        return _indexed_items(body, "data", _decode_data, expected, _embedding)


def _shared_request(own: dict[str, Any], parameters: Sequence[bytes], never: frozenset[str]) -> RemoteCall:
    members = {name: raw for name, raw in raw_members(next(iter(parameters), b"")).items() if name not in never}
    return RemoteCall(msgspec.json.encode({**members, **own}))


def _indexed_items(
    body: Body, member: str, decode: Callable[[Body], Any], expected: int, read: Callable[[msgspec.Raw], ItemResult]
) -> list[ItemResult]:
    """Read the objects in the list `member`, ordered by their `index`. Raises NoOutputs unless each index occurs exactly once.
    `decode` returns an object with this member and `usage`, both undecoded. `read` reads one element of the list."""
    try:
        answer = decode(body)
        return with_usage(_by_index(getattr(answer, member), expected, read), answer.usage)
    except msgspec.ValidationError:
        raise NoOutputs(f"no object with a list of {member}") from None
    except NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None


def _by_index(content: Json, expected: int, read: Callable[[msgspec.Raw], ItemResult]) -> list[ItemResult]:
    items: list[ItemResult | None] = [None] * expected
    for raw in elements(content, expected):
        try:
            index = _decode_index(raw).index
        except msgspec.ValidationError:
            raise NoOutputs("an output without an index") from None
        if not 0 <= index < expected:
            raise NoOutputs(f"an output with the index {excerpt(str(index))} for {expected} inputs")
        if items[index] is not None:
            raise NoOutputs(f"two outputs with the index {index}")
        items[index] = read(raw)
    return [item for item in items if item is not None]


def _choice(raw: msgspec.Raw) -> ItemResult:
    try:
        return ItemResult(_decode_choice(raw).text)
    except msgspec.ValidationError:
        return fault("a choice without a text", "a string")


def _embedding(raw: msgspec.Raw) -> ItemResult:
    try:
        numbers = _decode_embedding(raw).embedding
    except msgspec.ValidationError:
        return fault("no embedding", _NUMBERS)
    try:
        if not _check_numbers(numbers):
            return fault("an empty list", _NUMBERS)
    except msgspec.ValidationError:
        kind = kind_of(numbers)
        return fault("a list of something else" if kind == "list" else kind, _NUMBERS)
    return ItemResult(bytes(numbers).strip())


MEMBERS = ("outputs", "results", "predictions")  # Members that may contain the list. The first one present is used.
_NEITHER = f"neither a list nor an object with one of {', '.join(MEMBERS)}"


class TextList(Dialect, frozen=True):
    """The dialect `list`: a JSON list of the inputs."""

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
    """The dialect `inputs`: an object with the inputs, and their parameters if there are any."""

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
        if first_character(body) == "[":
            return _items(body, expected)
        wrapped = _decode_wrapped(body)
        content = next((raw for member in MEMBERS if memoryview(raw := getattr(wrapped, member))), msgspec.Raw())
        if first_character(content) != "[":
            raise NoOutputs(_NEITHER)
        return with_usage(with_metadata(_items(content, expected), wrapped.metadata), wrapped.usage)
    except msgspec.ValidationError:
        raise NoOutputs(_NEITHER) from None
    except NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None


def _items(content: Json, expected: int) -> list[ItemResult]:
    try:
        return [ItemResult(text) for text in _texts(expected)(content)]
    except msgspec.ValidationError:
        return [_item(raw) for raw in elements(content, expected)]


def _item(raw: msgspec.Raw) -> ItemResult:
    if first_character(raw) == '"':
        return ItemResult(_decode_text(raw))
    return fault(kind_of(raw), "a string")


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
    """Return the API at a URL. The URL must not contain credentials. `name` is the name of the dialect, or AUTO. `model` is the
    remote model's name, or empty. Raises SettingError if the URL or the model doesn't fit the dialect."""
    parts = urlsplit(url)
    chosen = _implied_by(parts.scheme, parts.path) if name == AUTO else name
    kind = DIALECTS[chosen]
    if parts.scheme not in kind.schemes:
        hint = f"Use a URL of {' or '.join(f'{scheme}://' for scheme in kind.schemes)}, or leave it out."
        raise SettingError("remote_format", name, f"is not available over {parts.scheme}://", hint)
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
