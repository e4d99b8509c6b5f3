"""Base class of the dialects, and helpers for JSON lists. A dialect encodes batches for one kind of remote API and decodes its answers.

Decoding a list stops at the first surplus element and skips unknown members, so an invalid answer costs almost nothing.

Dialects are frozen structs that do no I/O, so they can be sent as JSON to the process that decodes large answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Self

import msgspec

from headway.errors import SettingError
from headway.model import MOST_TOKENS, ItemResult, Signature, TokenCount, Value

JSON_BODY: Mapping[str, str] = MappingProxyType({"Content-Type": "application/json"})
Body = bytes | bytearray


class NoOutputs(Exception):
    """The answer doesn't have one output for each input. The message never quotes the answer."""


class NotSendable(Exception):
    """The dialect can't represent the batch. The message says why."""


class BadMetadata(Exception):
    """Headway can't send the remote model's inputs or read its outputs. The message says why, and what to do."""


class RemoteCall(msgspec.Struct, frozen=True, gc=False):
    """One request to a remote API; a GET if the body is empty. `headers` are sent in addition to the headers common to all
    requests. `place` is a URL or gRPC method; empty means the one for batches."""

    body: bytes
    headers: Mapping[str, str] = JSON_BODY
    place: str = ""


class Dialect(msgspec.Struct, frozen=True):
    """Base of all dialects."""

    path: ClassVar[str] = ""  # Pattern of URL paths that imply this dialect. Empty if users must choose it by name.
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")  # Any scheme but http and https implies the dialect.
    shared_parameters: ClassVar[bool] = False  # True if all inputs of a request must have the same parameters.

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Return the API at a URL. `model` is the remote model's name or empty. Raises SettingError if either is unsuitable."""
        raise NotImplementedError

    @property
    def signature(self) -> Signature:
        return Signature()

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode a batch of texts, or of tensors that differ only in their number of rows. `parameters` has a JSON object or b""
        for each input; with `shared_parameters`, all are identical. Raises UnicodeEncodeError if an input contains a lone
        surrogate, and NotSendable if the dialect can't represent a parameter."""
        raise NotImplementedError

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        """Decode an answer into one result for each of the `expected` inputs, in order. A bad output fails only its own input.
        If the API reports one token count for the whole batch, the first result gets it. Raises NoOutputs if the number of
        outputs is wrong, or the answer doesn't say which input each output belongs to.

        `json_bytes` is the length of the JSON if binary data follow it, or -1 if unknown. `rows` has the number of rows of each
        input (0 without a row axis); it is empty if no input has a row axis."""
        raise NotImplementedError

    def is_light(self, json_bytes: int) -> bool:
        """Return True if decoding the answer is about as fast as copying it. For `json_bytes`, see `decode`."""
        return False

    def models(self, answer: Body) -> list[str]:
        """Return the model names in the answer to `Remote.models`, or [] if the answer isn't a list of models."""
        return []

    def learn(self, metadata: Body) -> Self:
        """Return a copy adapted to the remote model's metadata. Raises BadMetadata."""
        return self


class Remote(msgspec.Struct, frozen=True):
    """A remote API and its dialect. The repr omits the URL, which may contain a secret. `metadata` and `models` are requests
    for the model's metadata and the list of models, or None. `model` is the remote model's name, or empty."""

    url: str
    dialect: Dialect
    metadata: RemoteCall | None = None
    models: RemoteCall | None = None
    model: str = ""

    def __repr__(self) -> str:
        return f"Remote({type(self.dialect).__name__})"


def needs_model(name: str, model: str) -> str:
    """Return the remote model's name. Raises SettingError if it is empty, because the dialect `name` needs one."""
    if not model:
        reason = f"is empty, but every request in the dialect {name} must name a model"
        raise SettingError("remote_model", model, reason, "Set it to the remote model's name.")
    return model


def raw_members(parameters: bytes) -> dict[str, Any]:
    """Return the undecoded members of a JSON object, or {} for b""."""
    return dict(msgspec.json.decode(parameters, type=dict[str, msgspec.Raw])) if parameters else {}


Json = bytes | bytearray | msgspec.Raw

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors for text that isn't JSON. Catch msgspec.ValidationError first, because it is a DecodeError, too."""

_COUNTED = 1 << 20  # Maximum size in bytes of a wrong list whose elements are counted for the error message.
_KINDS = {"n": "null", "t": "bool", "f": "bool", "[": "list", "{": "dict", '"': "string"}

_decode_any_list: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode


def elements(content: Json, expected: int) -> tuple[msgspec.Raw, ...]:
    """Return a list's undecoded elements. Raises NoOutputs if their number is wrong, or msgspec.DecodeError for bad JSON."""
    if first_character(content) != "[":
        raise NoOutputs(f"{kind_of(content)} instead of a list")
    try:
        raws: tuple[msgspec.Raw, ...] = _raws(expected)(content)
    except msgspec.ValidationError:
        raise NoOutputs(other_length(content, expected)) from None
    return raws


def first_character(content: Json) -> str:
    """Return the first character that isn't whitespace, or "" if the first 64 bytes are whitespace."""
    return bytes(memoryview(content)[:64]).lstrip()[:1].decode("latin-1")


def kind_of(content: Json) -> str:
    """Return the name of a JSON value's type, or `nothing` for b""."""
    return _KINDS.get(start, "number") if (start := first_character(content)) else "nothing"


def other_length(content: Json, expected: int) -> str:
    """Return the error message for a list of the wrong length."""
    if len(memoryview(content)) > _COUNTED:
        return f"a number of outputs other than {expected}, for {expected} inputs"
    return f"{len(_decode_any_list(content))} outputs for {expected} inputs"


def fault(value: str, expected: str) -> ItemResult:
    """Return a failed result for an output of the wrong type."""
    return ItemResult(None, f"the remote API answered {value} for this input, expected {expected}", True)


@lru_cache(maxsize=128)
def _raws(count: int) -> Any:
    return msgspec.json.Decoder(tuple[(msgspec.Raw,) * count]).decode  # type: ignore[misc]


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


class _Metadata(msgspec.Struct, gc=False):
    tokens_used: int = 0


_decode_usage: Any = msgspec.json.Decoder(_Usage).decode
_decode_metadata: Any = msgspec.json.Decoder(_Metadata).decode


def with_usage(items: list[ItemResult], usage: Json) -> list[ItemResult]:
    """Set the first result's token count from OpenAI's `usage`. A malformed `usage` is ignored."""
    try:
        counts = _decode_usage(usage)
    except NO_JSON:
        return items
    prompt, completion, total = counts.prompt_tokens, counts.completion_tokens, counts.total_tokens
    if prompt is None and completion is None:
        return with_tokens(items, total or 0)
    return with_tokens(items, (prompt or 0) + (completion or 0), prompt or 0)


def with_metadata(items: list[ItemResult], metadata: Json) -> list[ItemResult]:
    """Set the first result's token count from the `metadata` of another Headway. Malformed metadata is ignored."""
    try:
        return with_tokens(items, _decode_metadata(metadata).tokens_used)
    except NO_JSON:
        return items


def with_tokens(items: list[ItemResult], used: int, prompt: int = 0) -> list[ItemResult]:
    """Set the first result's token count to that of the whole batch. Impossible counts are ignored."""
    if items and 0 <= prompt <= used <= MOST_TOKENS and used:
        items[0] = msgspec.structs.replace(items[0], tokens=TokenCount(used, prompt))
    return items
