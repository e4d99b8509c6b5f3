"""Ids of requests."""

from __future__ import annotations

from collections.abc import Callable

import uuid_utils

NewId = Callable[[], str]  # Function like `new_id`.


def new_id() -> str:
    """Return a new request id: the text of a UUIDv7 (RFC 9562), so ids sort by time."""
    return str(uuid_utils.uuid7())
