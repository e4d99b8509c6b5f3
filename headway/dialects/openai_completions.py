"""Dialect `openai-completions`: `POST /v1/completions` with a list of prompts.

The texts of the choices are the outputs. Parameters are those of the whole request; the ones that would change how many
choices there are, or in which form they come, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from headway.dialects import json_lists
from headway.dialects.dialect import Dialect, Remote, RemoteCall, needs_model
from headway.dialects.openai import merged, model_names, reached, read_items
from headway.model import ItemResult, Value

_NEVER = frozenset(("model", "prompt", "messages", "n", "best_of", "stream", "stream_options"))
"""Parameters that are not sent. A chat's messages are in the prompt already."""


class Completions(Dialect, frozen=True):
    """Texts in, texts out, by the model of a name."""

    path: ClassVar[str] = ".*/v1/completions"
    shared_parameters: ClassVar[bool] = True
    model: str

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Take the URL as it is; the model has to be named."""
        return reached(url, cls(needs_model("openai-completions", model)), model)

    def models(self, answer: bytes | bytearray) -> list[str]:
        """Read the names of the models."""
        return model_names(answer)

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode the inputs as prompts of one request."""
        return RemoteCall(merged({"model": self.model, "prompt": inputs}, next(iter(parameters), b""), _NEVER))

    def decode(self, body: bytes | bytearray, expected: int, json_bytes: int = -1) -> list[ItemResult]:
        """Read the choices, one for each prompt."""
        return read_items(body, "choices", _decode, expected, _item)


class _Choices(msgspec.Struct, gc=False):
    choices: msgspec.Raw
    usage: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct, gc=False):
    text: str


_decode: Any = msgspec.json.Decoder(_Choices).decode
_decode_choice: Any = msgspec.json.Decoder(_Choice).decode


def _item(raw: msgspec.Raw) -> ItemResult:
    try:
        return ItemResult(_decode_choice(raw).text)
    except msgspec.ValidationError:
        return json_lists.fault("a choice without a text", "a string")
