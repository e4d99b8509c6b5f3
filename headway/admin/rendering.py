"""Text forms of the admin port: ids, instants, text, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headway.doors.fields import ID_PREFIX
from headway.http.requests import JSON, Request, RouteAnswer


def id_in(request: Request) -> str:
    """Request id in a path, with or without its prefix."""
    return request.params["id"].removeprefix(ID_PREFIX)


def text(text: str) -> str:
    """`text` with lone surrogates escaped, as a model may return them."""
    return text.encode("utf-8", "backslashreplace").decode()


def instant(seconds: float) -> str:
    """Unix time as RFC 3339 text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def as_json(content: Any, code: int = 200) -> RouteAnswer:
    """Answer in JSON."""
    return RouteAnswer(msgspec.json.encode(content), code, media_type=JSON)


def tier_name(tier: int, tiers: Sequence[str]) -> str:
    """Name of a tier by its index, or the index where this process has been given fewer tiers than others of the fleet."""
    return tiers[tier] if tier < len(tiers) else str(tier)
