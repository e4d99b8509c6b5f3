"""Entries that have their answer in common with others, for the broker suite."""

from __future__ import annotations

from headway.model import DedupKey, DedupKind, Entry, Failure, Reply, Subscription
from headway.ports import Broker
from tests.contracts.brokers import (
    AT_ONCE,
    Harness,
    ask,
    holds,
    ids,
    slot,
)

TTL = 100.0


def task(id: str, keep: float = TTL, digest: bytes = b"") -> DedupKey:
    return DedupKey(DedupKind.TASK, id, digest, keep)


def key(key: str = "k", digest: bytes = b"asked", keep: float = TTL) -> DedupKey:
    return DedupKey(DedupKind.KEY, key, digest, keep)


def same(key: str = "s", keep: float = TTL, joins: bool = True) -> DedupKey:
    return DedupKey(DedupKind.SAME, key, b"", keep, joins)


def sharing(id: str, *dedup_keys: DedupKey, input: str = "asked", **how: object) -> Entry:
    return ask(input, id=id, dedup_keys=dedup_keys, **how)  # type: ignore[arg-type]


def poll(
    id: str, task: str, *, tenant: str = "t", gateway: str = "g", timeout: float = 120.0, nonce: int = 0
) -> Subscription:
    """Waits for the outcome of a task."""
    return Subscription(id, task, "m", tenant, gateway, timeout, nonce)


async def offer(broker: Broker, *asked: Entry | Subscription) -> list[Failure | None]:
    """Offer entries, and then subscriptions."""
    entries = [one for one in asked if isinstance(one, Entry)]
    subscriptions = [one for one in asked if isinstance(one, Subscription)]
    verdicts: list[Failure | None] = []
    if entries:
        verdicts += await broker.enqueue(entries)
    if subscriptions:
        verdicts += await broker.subscribe(subscriptions)
    return verdicts


async def admit(harness: Harness, *asked: Entry | Subscription) -> None:
    assert await offer(harness.broker, *asked) == [None] * len(asked)


async def refused(harness: Harness, asked: Entry | Subscription) -> Failure:
    [verdict] = await offer(harness.broker, asked)
    assert verdict is not None
    return verdict


async def nothing_runs(harness: Harness, model: str = "m") -> None:
    """Check that there is nothing to claim, and nothing is counted as waiting."""
    holds(await harness.broker.claim(slot("nobody", model), AT_ONCE))
    assert sum(one.depth for one in await harness.broker.depths()) == 0


async def run_alone(harness: Harness, id: str) -> None:
    """Answer the one entry that is there to run."""
    lease = await harness.claim()
    assert ids(lease.entries) == [id]
    await harness.answer(lease)


def came_by(reply: Reply) -> tuple[DedupKind | None, bool]:
    return reply.shared, reply.kept


def code(reply: Reply) -> str | None:
    return None if reply.failure is None else reply.failure.code
