"""Entries that share their answers with others, for the broker suite."""

from headway.core.dedup import follower
from headway.model import DedupKey, DedupKind, Entry, Failure, Reply
from tests.contracts.brokers import AT_ONCE, Harness, ask, holds, ids, slot

TTL = 100.0


def task(id: str, keep: float = TTL, digest: bytes = b"") -> DedupKey:
    return DedupKey(DedupKind.TASK, id, digest, keep)


def key(key: str = "k", digest: bytes = b"asked", keep: float = TTL) -> DedupKey:
    return DedupKey(DedupKind.KEY, key, digest, keep)


def same(key: str = "s", keep: float = TTL, joins: bool = True) -> DedupKey:
    return DedupKey(DedupKind.SAME, key, b"", keep, joins)


def renewing(key: str = "s", keep: float = TTL) -> DedupKey:
    return DedupKey(DedupKind.SAME, key, b"", keep, False, True)


def sharing(id: str, *dedup_keys: DedupKey, input: str = "asked", **how: object) -> Entry:
    return ask(input, id=id, dedup_keys=dedup_keys, **how)  # type: ignore[arg-type]


def poll(id: str, task: str, *, tenant: str = "t", gateway: str = "g", timeout: float = 120.0, nonce: int = 0) -> Entry:
    return follower(id, task, tenant, gateway, timeout, nonce, "m")


async def admit(harness: Harness, *asked: Entry) -> None:
    assert await harness.broker.enqueue(asked) == [None] * len(asked)


async def refused(harness: Harness, asked: Entry) -> Failure:
    [verdict] = await harness.broker.enqueue([asked])
    assert verdict is not None
    return verdict


async def nothing_runs(harness: Harness, model: str = "m") -> None:
    """Check that nothing can be claimed and nothing counts as waiting."""
    holds(await harness.broker.claim(slot("nobody", model), AT_ONCE))
    assert sum(one.depth for one in await harness.broker.depths()) == 0


async def run_alone(harness: Harness, id: str) -> None:
    lease = await harness.claim()
    assert ids(lease.entries) == [id]
    await harness.answer(lease)


def came_by(reply: Reply) -> tuple[DedupKind | None, bool]:
    return reply.shared, reply.kept


def code(reply: Reply) -> str | None:
    return None if reply.failure is None else reply.failure.code
