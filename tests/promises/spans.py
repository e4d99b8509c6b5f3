"""Time spans in seconds: sorted lists of disjoint (begin, end)."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return union((begin, end) for begin, end in pairs if begin <= end)


def touches(spans: Sequence[Span], begin: float, end: float) -> bool:
    at = bisect_right(spans, (end, float("inf")))
    return at > 0 and spans[at - 1][1] >= begin
