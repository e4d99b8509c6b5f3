"""Limits of tenants: each input of a request counts as a request, at once or not at all.

A limit is a rate and a burst (GCRA): in any span of seconds no more is let in than the burst and what was earned meanwhile. What
was sent is what may have been charged; what was answered, and can have had no answer but one of its own, was charged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.promises.operation import ASKS, History, Operation, Violation


def charges(history: History) -> Iterator[Violation]:
    """What was let in beyond a limit, and what was refused within it."""
    if any(fault.cost.loses for fault in history.faults):
        return  # A limit that is lost is whole again.
    asked = Counter(text for one in history.operations if one.kind in ASKS for text in one.texts)
    for tenant, (rate, burst) in history.limits.items():
        own = [
            one for one in history.operations if one.tenant == tenant and one.kind in ASKS and one.returned is not None
        ]
        let_in = [one for one in own if one.status in (200, 202) and all(asked[text] == 1 for text in one.texts)]
        yield from _beyond(sorted(let_in, key=_returned), rate, burst)
        sent = [one for one in history.operations if one.tenant == tenant and one.kind in ASKS]
        for one in own:
            if one.code == "RATE_LIMITED" and one.status == 429:
                before = sum(len(other.texts) for other in sent if other.called <= _returned(one) and other is not one)
                if before + len(one.texts) <= burst:
                    yield Violation("refused within its limit", f"{one}, after {before} in all, burst {burst:g}")


def _beyond(let_in: Sequence[Operation], rate: float, burst: float) -> Iterator[Violation]:
    """The first request after which more had been let in than the limit allows since any that came before.

    Each was charged between its call and its answer.
    """
    least = (
        0.0  # The least of the earned less the charged over all earlier spans, as in a bucket that can be overdrawn.
    )
    last: Operation | None = None
    slack = rate * max((_returned(one) - one.called for one in let_in), default=0.0)
    for one in let_in:
        earned = rate * (_returned(one) - _returned(last)) if last is not None else 0.0
        least = min(least + earned, 0.0) - len(one.texts)
        last = one
        if -least > burst + slack + 1e-6:
            yield Violation("let in beyond its limit", f"{one}: {-least:g} beyond what was earned, burst {burst:g}")
            return


def _returned(one: Operation) -> float:
    return one.returned or one.called
