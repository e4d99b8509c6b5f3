"""Times that do not go together: what should end first must not last longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.health import HEARTBEAT_EVERY

if TYPE_CHECKING:
    from headway.config.settings import Settings

RENEWED_MS = HEARTBEAT_EVERY * 1000
"""Milliseconds after a claim at which its lease is first renewed."""


def fault(settings: Settings) -> tuple[str, str, str] | None:
    """Setting whose time does not go together with another one, why, and how to mend it; None if all do."""
    if settings.queue_timeout_ms > settings.request_timeout_ms:
        reason = f"is longer than `request_timeout_ms` ({settings.request_timeout_ms:g} ms)"
        return "queue_timeout_ms", reason, "Lower it, or raise `request_timeout_ms`."
    if settings.max_wait_ms is not None and settings.max_wait_ms > settings.queue_timeout_ms:
        reason = f"is longer than `queue_timeout_ms` ({settings.queue_timeout_ms:g} ms)"
        return "max_wait_ms", reason, "Every request would expire before its batch leaves; lower it."
    if settings.broker and settings.lease_ms < settings.broker_timeout_ms + RENEWED_MS:
        reason = (
            "ends before a worker renews it: a claim may take `broker_timeout_ms` "
            f"({settings.broker_timeout_ms:g} ms), and renewals begin {RENEWED_MS:g} ms later"
        )
        least = settings.broker_timeout_ms + RENEWED_MS
        return "lease_ms", reason, f"Raise it to {least:g} or more, leave it out, or lower `broker_timeout_ms`."
    return None
