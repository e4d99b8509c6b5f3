"""When gateways may know of no healthy worker for something, by processes and faults. Spans err on the long side."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tests.promises.faults import Fault
from tests.promises.operation import History, Presence
from tests.promises.spans import Span, common, union

KNOWN_SECONDS = 5.0
"""Seconds until all gateways that are not paused use new weights, and know which workers have started or recovered, if
no controller has a fault in that time."""
ALWAYS: list[Span] = [(-math.inf, math.inf)]

Name = TypeVar("Name", bound=Hashable)


def bare_times(history: History, names: Callable[[Presence], Iterable[Name]]) -> dict[Name, list[Span]]:
    """Return when nothing may have served each name. Names that are missing were never served."""
    watch = [fault for fault in history.faults if fault.what.startswith("controller")]
    trouble = _trouble(history.faults, watch)
    found: dict[Name, list[Span]] = {}
    for host in history.processes:
        if not host.host or len(host.models) > 1:  # With several models, any of them may not be loaded now.
            continue
        away = [(-math.inf, known_by(host.up, watch)), *trouble[""], *trouble[host.name]]
        away += [(host.gone, math.inf)] if host.gone is not None else []
        for name in names(host):
            found[name] = common(found.get(name, ALWAYS), union(away))
    return found


def known_by(began: float, faults: Sequence[Fault]) -> float:
    """Return when all gateways know of a change, allowing for faults in those that announce or receive it."""
    known = began + KNOWN_SECONDS
    for fault in sorted(faults, key=lambda fault: fault.began):
        if fault.began <= known and (fault.ended is None or fault.ended >= began):
            known = max(known, math.inf if fault.ended is None else fault.ended + KNOWN_SECONDS)
    return known


def _trouble(faults: Sequence[Fault], watch: Sequence[Fault]) -> defaultdict[str, list[Span]]:
    """Return when each host may be considered unhealthy, by name. The key "" holds the times for all hosts."""
    found = defaultdict[str, list[Span]](list)
    for fault in faults:
        role = fault.what.partition(" ")[0]
        if role in ("redis", "connections", "worker", "gpu", "service"):
            ended = math.inf if fault.ended is None else known_by(fault.ended, watch)
            found[fault.whom if role in ("worker", "gpu", "service") else ""].append((fault.began, ended))
    return found
