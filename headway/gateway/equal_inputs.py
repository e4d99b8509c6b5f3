"""Equal inputs of one request: where identical requests run once, the first of them is submitted, and the others get its outcome here.

The broker would do the same, entry by entry. But then a list of 1,024 equal texts is as many entries, and all of them have their
outcome in the one step that the first one's is told in: 16 ms of Redis.

    first ──submitted──▶ output ──┐
    equal ── waits ───────────────┴─▶ the same output, some in each turn of the event loop

An input whose first has failed gets nothing here: that failure is the outcome of the whole request, which lets go of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from headway.gateway.limiter import Limiter
from headway.gateway.pending import PendingRequest, PendingTable
from headway.model import DedupKind, Entry
from headway.runtime.fair_turns import FairTurns

AT_ONCE = 64
"""Most inputs that get their outcome in one turn of the event loop."""


class EqualInputs:
    """Equal inputs of all requests of one gateway.

    Arguments:
        pending: requests that the gateway holds.
        turns: line in which they wait for their outcomes.
        limiter: hears of those that have taken nothing of the capacity.
        finish: ends requests that have left the table, with their replies.
    """

    def __init__(
        self,
        pending: PendingTable,
        turns: FairTurns,
        limiter: Limiter,
        finish: Callable[[Sequence[PendingRequest]], None],
    ) -> None:
        self._pending, self._turns, self._limiter, self._finish = pending, turns, limiter, finish

    def follows(self, pending: PendingRequest) -> bool:
        """Return True if a newly held input equals an earlier one of its request. It takes that one's outcome, and isn't submitted."""
        several, key = pending.several, _shared_key(pending.entry)
        if several is None or not key:
            return False
        those = several.equal.setdefault(key, [])
        those.append(pending)
        if len(those) == 2 and those[0].ended:
            self._wait(those)
        return len(those) > 1

    def pass_on(self, first: PendingRequest) -> None:
        """Pass the output of an input on to those that are equal to it."""
        those = self._equal_to(first)
        if len(those) > 1 and those[0] is first:
            self._wait(those)

    def is_later(self, pending: PendingRequest) -> bool:
        """Whether an input gets the outcome of an earlier one."""
        those = self._equal_to(pending)
        return bool(those) and those[0] is not pending

    def _equal_to(self, pending: PendingRequest) -> list[PendingRequest]:
        several = pending.several
        return several.equal.get(_shared_key(pending.entry), []) if several is not None and several.equal else []

    def _wait(self, those: list[PendingRequest]) -> None:
        self._turns.wait(those[0].entry.tenant, partial(self._give, those))

    def _give(self, those: list[PendingRequest]) -> None:
        """Give some of those that wait the outcome of their first."""
        reply = those[0].reply
        shared = DedupKind.SAME if reply.shared is None else reply.shared
        some = [one for one in those[1 : AT_ONCE + 1] if self._pending.of(one.entry) is one]
        del those[1 : AT_ONCE + 1]
        for one in some:
            entry = one.entry
            one.reply = msgspec.structs.replace(reply, id=entry.id, nonce=entry.nonce, shared=shared)
            del self._pending[entry.tenant, entry.id]
            self._limiter.not_run(entry)
        if len(those) > 1:  # Before these end, as their request may end with them.
            self._wait(those)
        self._finish(some)


def _shared_key(entry: Entry) -> str:
    """Key by which an entry would join an identical one that runs; empty where it would not.

    Under an idempotency key each part has its own outcome, which the broker keeps: whoever asks again may ask for answers of
    their own, or may have done so the first time.
    """
    keys = entry.dedup_keys
    if keys and keys[0].kind is not DedupKind.SAME:
        return ""
    return next((one.key for one in keys if one.joins), "")
