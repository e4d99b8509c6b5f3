"""Tokens that a remote API tells of a whole answer, as the items of its batch have them."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.dialects import json_lists
from headway.dialects.json_lists import Json
from headway.model import MOST_TOKENS, ItemResult, TokenCount


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
    except json_lists.NO_JSON:
        return items
    prompt, completion, total = found.prompt_tokens, found.completion_tokens, found.total_tokens
    if prompt is None and completion is None:
        return with_tokens(items, total or 0)
    return with_tokens(items, (prompt or 0) + (completion or 0), prompt or 0)


def with_metadata(items: list[ItemResult], metadata: Json) -> list[ItemResult]:
    """Items, the first with the tokens that the `metadata` of Headway's own answers tell for all. What is none tells nothing."""
    try:
        return with_tokens(items, _decode_metadata(metadata).tokens_used)
    except json_lists.NO_JSON:
        return items


def with_tokens(items: list[ItemResult], used: int, prompt: int = 0) -> list[ItemResult]:
    """Items, the first with the tokens of all. Numbers that cannot be, and none of any token, tell nothing."""
    if items and 0 <= prompt <= used <= MOST_TOKENS and used:
        items[0] = msgspec.structs.replace(items[0], tokens=TokenCount(used, prompt))
    return items
