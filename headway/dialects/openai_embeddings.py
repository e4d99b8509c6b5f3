"""Dialect `openai-embeddings`: `POST /v1/embeddings` with a list of texts.

An output is the JSON text of the list of numbers, as the API wrote it. Parameters are those of the whole request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from headway.dialects import json_lists
from headway.dialects.dialect import Dialect, Remote, RemoteCall, needs_model
from headway.dialects.openai import merged, model_names, reached, read_items
from headway.model import ItemResult, Signature, Value, ValueKind

_NEVER = frozenset(("model", "input", "encoding_format"))
_NUMBERS = "a list of numbers"


class Embeddings(Dialect, frozen=True):
    """Texts in, lists of numbers out, by the model of a name."""

    path: ClassVar[str] = ".*/v1/embeddings"
    shared_parameters: ClassVar[bool] = True
    model: str

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Take the URL as it is; the model has to be named."""
        return reached(url, cls(needs_model("openai-embeddings", model)), model)

    @property
    def signature(self) -> Signature:
        """Texts in, JSON values out."""
        return Signature(gives=ValueKind.JSON)

    def models(self, answer: bytes | bytearray) -> list[str]:
        """Read the names of the models."""
        return model_names(answer)

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode the inputs as texts of one request, which asks for numbers and not for base64."""
        own = {"model": self.model, "input": inputs, "encoding_format": "float"}
        return RemoteCall(merged(own, next(iter(parameters), b""), _NEVER))

    def decode(self, body: bytes | bytearray, expected: int, json_bytes: int = -1) -> list[ItemResult]:
        """Read the embeddings, one for each text."""
        return read_items(body, "data", _decode, expected, _item)


class _Data(msgspec.Struct, gc=False):
    data: msgspec.Raw
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Embedding(msgspec.Struct, gc=False):
    embedding: msgspec.Raw


_decode: Any = msgspec.json.Decoder(_Data).decode
_decode_embedding: Any = msgspec.json.Decoder(_Embedding).decode
_check_numbers: Any = msgspec.json.Decoder(list[float]).decode


def _item(raw: msgspec.Raw) -> ItemResult:
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
