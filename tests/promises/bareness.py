"""Times in which there may be no healthy worker for something that gateways know of, by processes and faults. These spans are wide."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tests.promises.faults import Fault
from tests.promises.operation import History, Presence
from tests.promises.spans import Span, common, union

KNOWN_SECONDS = 5.0
"""Seconds after which all gateways that are not paused go by new weights, and know of workers that have come or recovered, if no
controller is in trouble meanwhile.
"""
ALWAYS: list[Span] = [(-math.inf, math.inf)]

Name = TypeVar("Name", bound=Hashable)


def bare_times(history: History, names: Callable[[Presence], Iterable[Name]]) -> dict[Name, list[Span]]:
    """Times in which nobody may have served something, by worker hosts and what they serve; what is not among its keys was never
    served."""
    watch = [fault for fault in history.faults if fault.what.startswith("controller")]
    trouble = _trouble(history.faults, watch)
    found: dict[Name, list[Span]] = {}
    for host in history.processes:
        if not host.host or len(host.models) > 1:  # Any of several models may not be loaded now.
            continue
        away = [(-math.inf, known_by(host.up, watch)), *trouble[""], *trouble[host.name]]
        away += [(host.gone, math.inf)] if host.gone is not None else []
        for name in names(host):
            found[name] = common(found.get(name, ALWAYS), union(away))
    return found


def known_by(began: float, faults: Sequence[Fault]) -> float:
    """Instant by which all gateways know of what changed, beside faults of those who tell it or should hear it."""
    known = began + KNOWN_SECONDS
    for fault in sorted(faults, key=lambda fault: fault.began):
        if fault.began <= known and (fault.ended is None or fault.ended >= began):
            known = max(known, math.inf if fault.ended is None else fault.ended + KNOWN_SECONDS)
    return known


def _trouble(faults: Sequence[Fault], watch: Sequence[Fault]) -> defaultdict[str, list[Span]]:
    """Times in which a host may not be taken for healthy, by its name; those of all hosts are at ""."""
    found = defaultdict[str, list[Span]](list)
    for fault in faults:
        role = fault.what.partition(" ")[0]
        if role in ("redis", "connections", "worker", "gpu", "service"):
            ended = math.inf if fault.ended is None else known_by(fault.ended, watch)
            found[fault.whom if role in ("worker", "gpu", "service") else ""].append((fault.began, ended))
    return found
