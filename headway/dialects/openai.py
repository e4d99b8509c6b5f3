"""Dialects `openai-completions` and `openai-embeddings`: `POST /v1/completions` or `/v1/embeddings` with a list of texts.

An output is a choice's text, or the JSON text of an embedding exactly as the API wrote it. Parameters apply to the whole
request. Parameters that would change the number or form of the outputs are not sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from headway.core.excerpt import excerpt
from headway.dialects import json_lists
from headway.dialects.dialect import Body, Dialect, NoOutputs, Remote, RemoteCall, needs_model, raw_members
from headway.dialects.json_lists import Json, with_usage
from headway.model import ItemResult, Signature, Value, ValueKind

_NO_COMPLETION = frozenset(("model", "prompt", "messages", "n", "best_of", "stream", "stream_options"))
"""Parameters that are never sent with prompts. `messages` is already rendered into the prompt."""
_NO_EMBEDDING = frozenset(("model", "input", "encoding_format"))
"""Parameters that are never sent with texts to embed."""
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
    """Base of both dialects, whose requests name the model."""

    name: ClassVar[str] = ""
    shared_parameters: ClassVar[bool] = True
    model: str

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Use the URL as it is. If it ends like OpenAI's, the list of models is next to it."""
        parts = urlsplit(url)
        match = re.fullmatch("(.*/v1)/(completions|embeddings)", parts.path)
        models = None if match is None else RemoteCall(b"", {}, parts._replace(path=f"{match[1]}/models").geturl())
        return Remote(url, cls(needs_model(cls.name, model)), models=models, model=model)

    def models(self, answer: Body) -> list[str]:
        try:
            return [model.id for model in _decode_models(answer).data]
        except (*json_lists.NO_JSON, msgspec.ValidationError):
            return []


class Completions(NamedModel, frozen=True):
    """Texts in, texts out."""

    name: ClassVar[str] = "openai-completions"
    path: ClassVar[str] = ".*/v1/completions"

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        return _request({"model": self.model, "prompt": inputs}, parameters, _NO_COMPLETION)

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        return _items(body, "choices", _decode_choices, expected, _choice)


class Embeddings(NamedModel, frozen=True):
    """Texts in, lists of numbers out."""

    name: ClassVar[str] = "openai-embeddings"
    path: ClassVar[str] = ".*/v1/embeddings"

    @property
    def signature(self) -> Signature:
        return Signature(gives=ValueKind.JSON)

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        own = {"model": self.model, "input": inputs, "encoding_format": "float"}
        return _request(own, parameters, _NO_EMBEDDING)

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        return _items(body, "data", _decode_data, expected, _embedding)


def _request(own: dict[str, Any], parameters: Sequence[bytes], never: frozenset[str]) -> RemoteCall:
    members = {name: raw for name, raw in raw_members(next(iter(parameters), b"")).items() if name not in never}
    return RemoteCall(msgspec.json.encode({**members, **own}))


def _items(
    body: Body,
    member: str,
    decode: Callable[[Body], Any],
    expected: int,
    read: Callable[[msgspec.Raw], ItemResult],
) -> list[ItemResult]:
    """Read the objects in the list `member`, in the order of their `index` fields. Raises NoOutputs unless there is one for each
    index. `decode` reads the answer into an object with that member and `usage`, both undecoded. `read` reads a list element."""
    try:
        answer = decode(body)
        return with_usage(_by_index(getattr(answer, member), expected, read), answer.usage)
    except msgspec.ValidationError:
        raise NoOutputs(f"no object with a list of {member}") from None
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None


def _by_index(content: Json, expected: int, read: Callable[[msgspec.Raw], ItemResult]) -> list[ItemResult]:
    items: list[ItemResult | None] = [None] * expected
    for raw in json_lists.elements(content, expected):
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
        return json_lists.fault("a choice without a text", "a string")


def _embedding(raw: msgspec.Raw) -> ItemResult:
    try:
        numbers = _decode_embedding(raw).embedding
    except msgspec.ValidationError:
        return json_lists.fault("no embedding", _NUMBERS)
    try:
        if not _check_numbers(numbers):
            return json_lists.fault("an empty list", _NUMBERS)
    except msgspec.ValidationError:
        kind = json_lists.kind(numbers)
        return json_lists.fault("a list of other things" if kind == "list" else kind, _NUMBERS)
    return ItemResult(bytes(numbers).strip())
