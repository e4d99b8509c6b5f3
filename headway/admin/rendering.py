"""Text forms that all admin routes share: ids, instants, texts, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headway.doors.fields import ID_PREFIX
from headway.http.requests import JSON, Request, RouteAnswer


def id_in(request: Request) -> str:
    """Return the request id in a path, without its prefix."""
    return request.params["id"].removeprefix(ID_PREFIX)


def text(text: str) -> str:
    """Escape lone surrogates, which a model may return and JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def instant(seconds: float) -> str:
    """Format Unix time as in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def as_json(content: Any, code: int = 200) -> RouteAnswer:
    """Make a JSON answer."""
    return RouteAnswer(msgspec.json.encode(content), code, media_type=JSON)


def tier_name(tier: int, tiers: Sequence[str]) -> str:
    """Return a tier's name, or its index if this process is configured with fewer tiers than the fleet."""
    return tiers[tier] if tier < len(tiers) else str(tier)
