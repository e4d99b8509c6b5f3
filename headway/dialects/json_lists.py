"""Lists of exactly so many elements out of JSON, read with bounds, and the tokens that an API tells beside them.

Reading stops at the first element too many, and what nobody asked for is skipped, not built. So a body of other things
costs next to nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from headway.dialects.dialect import NoOutputs
from headway.model import MOST_TOKENS, ItemResult, TokenCount

Json = bytes | bytearray | msgspec.Raw
"""JSON text, or part of one."""

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a text that is no JSON. A validation error is one of them, and is to be caught first."""

_COUNTED = 1 << 20
"""Bytes of a list of another length up to which its elements are counted, for the error's text."""
_KINDS = {"n": "null", "t": "bool", "f": "bool", "[": "list", "{": "dict", '"': "string"}

_decode_any_list: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode


def elements(content: Json, expected: int) -> tuple[msgspec.Raw, ...]:
    """The `expected` elements of a list, whatever they are.

    Raises:
        NoOutputs: it is no list, or one of another length.
        msgspec.DecodeError: it is no JSON.
    """
    if first(content) != "[":
        raise NoOutputs(f"{kind(content)} instead of a list")
    try:
        found: tuple[msgspec.Raw, ...] = _raws(expected)(content)
    except msgspec.ValidationError:
        raise NoOutputs(other_length(content, expected)) from None
    return found


def first(content: Json) -> str:
    """First character that is no space; empty for a text that begins with many spaces."""
    return bytes(memoryview(content)[:64]).lstrip()[:1].decode("latin-1")


def kind(content: Json) -> str:
    """Name of the kind of a JSON text; `nothing` for an empty one."""
    return _KINDS.get(start, "number") if (start := first(content)) else "nothing"


def other_length(content: Json, expected: int) -> str:
    """Text that says of a list that its length is not the expected one."""
    if len(memoryview(content)) > _COUNTED:
        return f"another number of outputs than {expected}, for {expected} inputs"
    return f"{len(_decode_any_list(content))} outputs for {expected} inputs"


def fault(what: str, wanted: str) -> ItemResult:
    """Failed item of an output that is something else than wanted."""
    return ItemResult(None, f"the remote API answered {what} for this input, expected {wanted}", True)


@lru_cache(maxsize=128)
def _raws(count: int) -> Any:
    """Decoder of a list of exactly `count` elements."""
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
    """Items, the first with the tokens that a `usage` of OpenAI's form tells for all. What is none tells nothing."""
    try:
        found = _decode_usage(usage)
    except NO_JSON:
        return items
    prompt, completion, total = found.prompt_tokens, found.completion_tokens, found.total_tokens
    if prompt is None and completion is None:
        return with_tokens(items, total or 0)
    return with_tokens(items, (prompt or 0) + (completion or 0), prompt or 0)


def with_metadata(items: list[ItemResult], metadata: Json) -> list[ItemResult]:
    """Items, the first with the tokens that the `metadata` of Headway's own answers tell for all. What is none tells nothing."""
    try:
        return with_tokens(items, _decode_metadata(metadata).tokens_used)
    except NO_JSON:
        return items


def with_tokens(items: list[ItemResult], used: int, prompt: int = 0) -> list[ItemResult]:
    """Items, the first with the tokens of all. Numbers that cannot be, and none of any token, tell nothing."""
    if items and 0 <= prompt <= used <= MOST_TOKENS and used:
        items[0] = msgspec.structs.replace(items[0], tokens=TokenCount(used, prompt))
    return items
