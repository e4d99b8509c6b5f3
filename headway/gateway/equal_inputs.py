"""Equal inputs of one request. If identical requests share answers, only the first is submitted. The others copy its output.

    first ──submitted──▶ output ──┐
    equal ── waits ───────────────┴─▶ the same output, some in each turn of the event loop

The broker would do the same for each entry. But 1,024 equal texts would then be 1,024 entries that all end in one step, which
takes Redis 16 ms. If the first input fails, so does the whole request, and the others are abandoned.
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
"""Maximum number of inputs that get their output in one turn of the event loop."""


class EqualInputs:
    """Equal inputs of all requests of one gateway.

    Outputs are copied in the `turns` of tenants. `finish` ends requests that have their replies and have left the table.
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
        """Add a new input. Returns True if it equals an earlier one of its request, so it mustn't be submitted."""
        several, key = pending.several, _shared_key(pending.entry)
        if several is None or not key:
            return False
        inputs = several.equal.setdefault(key, [])
        inputs.append(pending)
        if len(inputs) == 2 and inputs[0].ended:
            self._wait(inputs)
        return len(inputs) > 1

    def pass_on(self, first: PendingRequest) -> None:
        """Copy an input's output to the inputs equal to it."""
        inputs = self._equal_to(first)
        if len(inputs) > 1 and inputs[0] is first:
            self._wait(inputs)

    def is_later(self, pending: PendingRequest) -> bool:
        """Return True if an input will get the output of an earlier one."""
        inputs = self._equal_to(pending)
        return bool(inputs) and inputs[0] is not pending

    def _equal_to(self, pending: PendingRequest) -> list[PendingRequest]:
        several = pending.several
        return several.equal.get(_shared_key(pending.entry), []) if several is not None and several.equal else []

    def _wait(self, inputs: list[PendingRequest]) -> None:
        self._turns.wait(inputs[0].entry.tenant, partial(self._give, inputs))

    def _give(self, inputs: list[PendingRequest]) -> None:
        """Give the first input's output to the next AT_ONCE."""
        reply = inputs[0].reply
        shared = DedupKind.SAME if reply.shared is None else reply.shared
        ended = [pending for pending in inputs[1 : AT_ONCE + 1] if self._pending.of(pending.entry) is pending]
        del inputs[1 : AT_ONCE + 1]
        for pending in ended:
            entry = pending.entry
            pending.reply = msgspec.structs.replace(reply, id=entry.id, nonce=entry.nonce, shared=shared)
            del self._pending[entry.tenant, entry.id]
            self._limiter.not_run(entry)
        if len(inputs) > 1:  # Before `finish`, which may end the whole request.
            self._wait(inputs)
        self._finish(ended)


def _shared_key(entry: Entry) -> str:
    """Return the key by which an entry would join an identical one; empty if it wouldn't.

    With an idempotency key, the broker keeps an outcome for each part, because the client may want answers of its own for this
    request or for a repetition.
    """
    keys = entry.dedup_keys
    if keys and keys[0].kind is not DedupKind.SAME:
        return ""
    return next((dedup_key.key for dedup_key in keys if dedup_key.joins), "")
