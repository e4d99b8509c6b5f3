"""Decode JSON lists of a known length, and token counts beside them. Decoding stops at the first surplus element and skips unknown
members, so an answer of the wrong kind costs next to nothing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from headway.dialects.dialect import NoOutputs
from headway.model import MOST_TOKENS, ItemResult, TokenCount

Json = bytes | bytearray | msgspec.Raw
"""JSON text, or part of one."""

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of text that isn't JSON. DecodeError includes msgspec.ValidationError, so catch that first."""

_COUNTED = 1 << 20
"""Most bytes of a list of the wrong length whose elements are counted for the error message."""
_KINDS = {"n": "null", "t": "bool", "f": "bool", "[": "list", "{": "dict", '"': "string"}

_decode_any_list: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode


def elements(content: Json, expected: int) -> tuple[msgspec.Raw, ...]:
    """Return the elements of a list, undecoded. Raises NoOutputs if the text isn't a list of `expected` elements,
    msgspec.DecodeError if it isn't JSON."""
    if first(content) != "[":
        raise NoOutputs(f"{kind(content)} instead of a list")
    try:
        raws: tuple[msgspec.Raw, ...] = _raws(expected)(content)
    except msgspec.ValidationError:
        raise NoOutputs(other_length(content, expected)) from None
    return raws


def first(content: Json) -> str:
    """Return the first character that isn't white space; empty if the first 64 bytes have none."""
    return bytes(memoryview(content)[:64]).lstrip()[:1].decode("latin-1")


def kind(content: Json) -> str:
    """Return the name of a JSON value's type; `nothing` for no text."""
    return _KINDS.get(start, "number") if (start := first(content)) else "nothing"


def other_length(content: Json, expected: int) -> str:
    """Return the error message for a list of the wrong length."""
    if len(memoryview(content)) > _COUNTED:
        return f"another number of outputs than {expected}, for {expected} inputs"
    return f"{len(_decode_any_list(content))} outputs for {expected} inputs"


def fault(what: str, wanted: str) -> ItemResult:
    """Return a failed result for an output of the wrong type."""
    return ItemResult(None, f"the remote API answered {what} for this input, expected {wanted}", True)


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
    """Set the first result's token count from OpenAI's `usage`. A malformed one is ignored."""
    try:
        counts = _decode_usage(usage)
    except NO_JSON:
        return items
    prompt, completion, total = counts.prompt_tokens, counts.completion_tokens, counts.total_tokens
    if prompt is None and completion is None:
        return with_tokens(items, total or 0)
    return with_tokens(items, (prompt or 0) + (completion or 0), prompt or 0)


def with_metadata(items: list[ItemResult], metadata: Json) -> list[ItemResult]:
    """Set the first result's token count from the `metadata` of Headway's own answers. A malformed one is ignored."""
    try:
        return with_tokens(items, _decode_metadata(metadata).tokens_used)
    except NO_JSON:
        return items


def with_tokens(items: list[ItemResult], used: int, prompt: int = 0) -> list[ItemResult]:
    """Set the first result's token count to that of the whole batch. Impossible counts are ignored."""
    if items and 0 <= prompt <= used <= MOST_TOKENS and used:
        items[0] = msgspec.structs.replace(items[0], tokens=TokenCount(used, prompt))
    return items
