"""Zones: what comes to a gateway runs in its zone, unless that is behind, or has nobody.

A batch of another zone's entries is help. A zone is helped where its oldest entry has waited for longer than a batch takes; so
when a batch helps, something has waited there for at least the shortest time that any batch took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.promises.bareness import ALWAYS, KNOWN_SECONDS, bare_times
from tests.promises.operation import ASKS, History, Operation, Presence, Run, Violation
from tests.promises.spans import touches


def zones(history: History) -> Iterator[Violation]:
    """Help between zones without a need; nothing where there are no zones."""
    processes = {one.name: one for one in history.processes}
    if len({one.zone for one in history.processes}) < 2:
        return
    bare = bare_times(history, lambda host: [(host.zone, model, host.version) for model in host.models])
    asked = defaultdict[str, list[Operation]](list)
    for one in history.operations:
        if one.kind in ASKS and one.lost != "torn":
            for text in one.texts:
                asked[text].append(one)
    began = defaultdict[str, list[float]](list)
    for run in history.runs:
        for text in run.inputs:
            began[text].append(run.began)
    least = min((run.ended - run.began for run in history.runs if run.ended is not None), default=0.0)
    for run in history.runs:
        host = processes.get(run.host)
        helped = _helped(run, host, asked, processes) if host is not None and host.zone else []
        if any(_excused(one, run, processes[one.gateway], bare, history) for one in helped):
            continue
        homes = {(processes[one.gateway].zone, one.model) for one in helped}
        waits = [run.began - one.called for one in _waiting(history, run.began, began)
                 if one.gateway in processes and (processes[one.gateway].zone, one.model) in homes]  # fmt: skip
        if helped and max(waits, default=0.0) < least:
            story = f"{helped[0]}: ran at {run.began:.3f} in {host.zone if host else ''}"
            yield Violation("help from another zone for what had not waited", story)


def _waiting(history: History, now: float, began: dict[str, list[float]]) -> Iterator[Operation]:
    """Requests with an input that may wait for its run at an instant."""
    for one in history.operations:
        if one.kind in ASKS and one.called <= now:
            runs = [max((at for at in began[text] if at >= one.called), default=now) for text in one.texts]
            if max(runs) >= now and (one.returned is None or one.returned >= now or one.status == 202):
                yield one


def _helped(
    run: Run, host: Presence, asked: dict[str, list[Operation]], processes: dict[str, Presence]
) -> list[Operation]:
    """Requests of other zones of which a run has inputs that nobody asked in its own."""
    found: list[Operation] = []
    for text in run.inputs:
        before = [one for one in asked.get(text, ()) if one.called <= run.began]
        there = [processes[one.gateway] for one in before if one.gateway in processes]
        if before and len(there) == len(before) and all(one.zone != host.zone for one in there):
            found.append(min(before, key=lambda one: one.called))
    return found


def _excused(
    one: Operation, run: Run, gateway: Presence, bare: dict[tuple[str, str, str], list[tuple[float, float]]], history: History
) -> bool:  # fmt: skip
    """Whether a zone may have had nobody, as its gateway knew, for what it was asked; so it is with what only shared GPUs run."""
    versions = {version for _, model, version in bare if model == one.model}
    spans = [bare.get((gateway.zone, one.model, version), ALWAYS) for version in versions]
    young = one.called < gateway.up + KNOWN_SECONDS
    stood = any(
        fault.what == "gateway paused"
        and fault.whom == gateway.name
        and fault.began <= run.began
        and (fault.ended or run.began) + KNOWN_SECONDS >= one.called
        for fault in history.faults
    )
    return young or stood or not versions or any(touches(span, one.called, run.began) for span in spans)
