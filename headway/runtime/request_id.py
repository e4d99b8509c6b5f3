"""Ids of requests: alone, as nothing else is needed by all that makes them."""

from __future__ import annotations

from collections.abc import Callable

import uuid_utils

NewId = Callable[[], str]
"""Function that makes the text of a fresh UUIDv7."""


def new_id() -> str:
    """Return a fresh request id: UUIDv7 text (RFC 9562), so that ids sort by time."""
    return str(uuid_utils.uuid7())
