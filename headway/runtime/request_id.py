"""Ids of requests."""

from __future__ import annotations

import uuid_utils


def new_id() -> str:
    """A fresh request id: UUIDv7 text (RFC 9562), so that ids sort by time."""
    return str(uuid_utils.uuid7())
