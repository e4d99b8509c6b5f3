"""Who a credential stands for, in the house's words: its tier by number, and what its requests count towards."""

from __future__ import annotations

from collections.abc import Iterable

from headway.config import Settings
from headway.model import Limit, Principal

BURST_SECONDS = 10.0
"""Requests at once when nothing else is said: so many seconds' worth of the rate."""


def make_caller(
    settings: Settings,
    user: str,
    tenant: str,
    tier: str,
    *,
    key: str = "",
    rate: float | None = None,
    burst: float | None = None,
    models: Iterable[str] = (),
) -> Principal:
    """The caller of one credential.

    Arguments:
        settings: for the tiers and their rates, and for the rate of users.
        user: unique within the tenant.
        tenant: who pays.
        tier: name of a tier.
        key: id of the key, empty where there is none.
        rate: requests a minute of this key alone; None: it counts towards its user's limit; 0: no limit.
        burst: requests of this key at once; None: ten seconds' worth.
        models: the only models it may ask; empty for all.

    Raises:
        ValueError: there is no such tier.
    """
    limits = []
    if rate is not None:
        limits.append(_limit(f"key\0{key}", "key", rate, burst))
    else:
        limits.append(_limit(f"user\0{tenant}\0{user}", "user", settings.user_rate, settings.user_burst or None))
    limits.append(_limit(f"tier\0{tier}", "tier", settings.tier_rate(tier), None))
    return Principal(
        user=user,
        tenant=tenant,
        tier=settings.tier_names.index(tier),
        limits=tuple(limit for limit in limits if limit.rate > 0.0),
        models=frozenset(models),
        key=key,
    )


def _limit(id: str, name: str, rate: float, burst: float | None) -> Limit:
    return Limit(id, name, rate, max(1.0, rate * BURST_SECONDS / 60 if burst is None else burst))
