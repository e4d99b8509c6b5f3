"""Helpers for deduplication tests: make entries that share an outcome, start them and answer them."""

from collections.abc import Sized

from headway import errors
from headway.core.dedup import Consequences, Dedup
from headway.core.fair_queue import QueuedEntry, queued_at
from headway.core.retention import KeptLimits
from headway.model import DedupKey, DedupKind, Entry, Failure, Reply

NOW = 1000.0
PLENTY = KeptLimits.of(1 << 30, 1 << 30)
LATE = Failure(errors.DEADLINE_EXCEEDED, "too late")


def make(id: str, *dedup_keys: DedupKey, tenant: str = "t", timeout: float = 60.0, input: str = "asked") -> Entry:
    return Entry(id, "m", input, 1, tenant, "g", timeout, timeout, dedup_keys=dedup_keys, nonce=len(id))


def left_over(sharing: Dedup) -> dict[str, object]:
    state = vars(sharing) | vars(sharing.followers) | {"kept": sharing._kept._retention}
    return {name: value for name, value in state.items() if (value if isinstance(value, Sized | int) else 0)}


def begin(sharing: Dedup, entry: Entry, now: float = NOW) -> QueuedEntry:
    queued = queued_at(entry, now)
    assert sharing.join(queued, now) is None
    sharing.begin(queued, now)
    return queued


def answer(sharing: Dedup, queued: QueuedEntry, output: str, now: float = NOW) -> Consequences:
    return sharing.end(queued, Reply(queued.entry.id, queued.entry.tenant, output), now)


def same(key: str = "s", keep: float = 60.0) -> DedupKey:
    return DedupKey(DedupKind.SAME, key, b"", keep)
