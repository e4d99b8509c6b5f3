"""Tenants' limits on one model or all models: each input counts as a request, and is charged immediately or not at all.

A limit is a rate and a burst (GCRA): in any span of time, no more requests are accepted than the burst and what was
earned in the span. Any request that was sent may have been charged. One was certainly charged if it was answered and
the answer can only be its own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.promises.operation import ASKS, History, Operation, Violation


def charges(history: History) -> Iterator[Violation]:
    """Find requests accepted beyond a limit, and requests refused although within all limits."""
    if any(fault.cost.loses for fault in history.faults):
        return  # A lost limit starts again with its full burst.
    asked = Counter(text for one in history.operations if one.kind in ASKS for text in one.texts)
    for limit, (rate, burst) in history.limits.items():
        own = [one for one in history.operations if _counts(one, limit) and one.returned is not None]
        let_in = [one for one in own if one.status in (200, 202) and all(asked[text] == 1 for text in one.texts)]
        yield from _beyond(sorted(let_in, key=_returned), rate, burst)
    for one in history.operations:
        if one.kind in ASKS and one.code == "RATE_LIMITED" and one.status == 429:
            yield from _refused(history, one)


def _counts(one: Operation, limit: tuple[str, str | None]) -> bool:
    """Return True if a limit (a tenant's, on a model or on all models) counts a request."""
    tenant, model = limit
    return one.kind in ASKS and one.tenant == tenant and model in (None, one.model)


def _refused(history: History, one: Operation) -> Iterator[Violation]:
    """Find a refusal although each limit still had room for it, even if everything sent was charged."""
    own = {limit: burst for limit, (_, burst) in history.limits.items() if _counts(one, limit)}
    before = {
        limit: sum(
            len(other.texts)
            for other in history.operations
            if _counts(other, limit) and other.called <= _returned(one) and other is not one
        )
        for limit in own
    }
    if own and all(before[limit] + len(one.texts) <= burst for limit, burst in own.items()):
        told = ", ".join(f"{before[limit]} of {burst:g}" for limit, burst in own.items())
        yield Violation("refused within its limit", f"{one}, after {told}")


def _beyond(let_in: Sequence[Operation], rate: float, burst: float) -> Iterator[Violation]:
    """Find the first request that exceeds the limit since any earlier one. Each was charged between call and answer."""
    least = 0.0  # The minimum of earned minus charged over all earlier spans, as in a bucket that can be overdrawn.
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
