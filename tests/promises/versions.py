"""Model versions: which version runs a request, given the one it names or the weights, and which one is reported.

A version is *drawn* for a request that names none, using the gateway's weights when it arrives. A version is *bare*
while gateways may know of no healthy worker for it: then workers of another version help with requests that drew it,
and requests that name it are refused. Time spans err on the long side: what a fault may explain is no violation.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from headway.core.versions import Versions, position_of
from tests.promises.bareness import ALWAYS, KNOWN_SECONDS, bare_times, known_by
from tests.promises.client import PATIENCE
from tests.promises.groups import Groups
from tests.promises.operation import ASKS, History, Kind, Operation, Run, Telling, Violation, mark_of
from tests.promises.spans import touches


def versions(history: History) -> Iterator[Violation]:
    if history.weighings:
        yield from _Judge(history).judge()


class Rollout:
    """Which versions may be drawn, may be named, and may be bare, at any time in a history."""

    def __init__(self, history: History) -> None:
        paused = [fault for fault in history.faults if fault.what == "gateway paused"]
        begun = [weighing.began for weighing in history.weighings]
        self._weighings = [
            (weighing.weights, weighing.began, known_by(after, paused) if after < math.inf else math.inf)
            for weighing, after in zip(history.weighings, [*begun[1:], math.inf], strict=True)
        ]
        self._up = {one.name: one.up for one in history.processes if not one.version and not one.host}
        self._bare = bare_times(history, lambda host: [(model, host.version) for model in host.models])

    def weights(self, since: float, until: float) -> list[Mapping[str, float]]:
        return [weights for weights, began, ended in self._weighings if began <= until and ended >= since]

    def drawn(self, since: float, until: float) -> set[str]:
        """Return the versions that may be drawn in this time."""
        return {version for weights in self.weights(since, until) for version, weight in weights.items() if weight}

    def takes(self, model: str, version: str, since: float, until: float) -> bool:
        """Return True if requests that name a version of a model are accepted throughout this time."""
        own = (model, version) in self._bare and not self.bare(model, version, since, until)
        return own and all(weights.get(version) != 0.0 for weights in self.weights(since, until))

    def bare(self, model: str, version: str, since: float, until: float) -> bool:
        """Return True if a version of a model may have had no healthy worker at some point in this time."""
        return touches(self._bare.get((model, version), ALWAYS), since, until)

    def is_young(self, gateway: str, at: float) -> bool:
        """Return True if a gateway may not know all workers yet."""
        return at < self._up.get(gateway, -math.inf) + KNOWN_SECONDS

    def named(self, one: Operation, ran: float) -> str:
        """Return the version that a request's key or id draws if answered from `ran` on. Empty if undecidable."""
        until = _until(one)
        found = self.weights(one.called, until)
        by_name = one.key or one.chosen or one.kind is Kind.TASK or one.entries > 1
        if len(found) != 1 or not by_name or not (one.key or one.id):
            return ""
        wanted = [version for version, weight in found[0].items() if weight]
        if any(self.bare(one.model, version, min(one.called, ran), max(until, ran)) for version in wanted):
            return ""
        return Versions(dict.fromkeys(wanted, 1), wanted, found[0]).drawn(position_of(one.tenant, one.key or one.id))


class _Judge:
    def __init__(self, history: History) -> None:
        self._history, self._rollout = history, Rollout(history)
        self._runs: dict[str, Run] = {mark: run for run in history.runs for mark in run.marks()}
        self._groups = Groups(history, shares=False)
        self._mates = defaultdict[object, list[tuple[Operation, int]]](list)
        for one in history.operations:
            if one.kind in ASKS and one.lost != "torn":
                for place in range(len(one.texts)):
                    self._mates[self._groups.of(one, place)].append((one, place))

    def judge(self) -> Iterator[Violation]:
        for one in self._history.operations:
            yield from self._told(one)
            yield from self._refused(one)
            for place, output in enumerate(one.answers):
                run = self._runs.get(mark_of(output))
                if run is not None and (one.kind in ASKS or self._groups.knows(one)):
                    yield from self._ran(one, place, run)
        yield from self._tellings()

    def _told(self, one: Operation) -> Iterator[Violation]:
        """Check that an answer that gives versions gives those of all its outputs, and no others."""
        ran = {run.version for output in one.answers if (run := self._runs.get(mark_of(output))) is not None}
        if ran and one.told and set(one.told) != ran:
            story = f"{one}: tells {one.version}, {', '.join(sorted(ran))} ran"
            yield Violation("an answer tells another version than ran it", story)

    def _refused(self, one: Operation) -> Iterator[Violation]:
        if not one.wanted or one.returned is None or self._rollout.is_young(one.gateway, one.called):
            return
        if not self._rollout.takes(one.model, one.wanted, one.called, one.returned):
            return
        if one.status == 404 and one.kind is Kind.ASK:
            yield Violation("a version that is there is refused", str(one))
        if one.code == "NO_WORKERS":
            yield Violation("a request for a version that is there failed for want of workers", str(one))

    def _ran(self, one: Operation, place: int, run: Run) -> Iterator[Violation]:
        """Check that a run's version was named, drawn, or helped with a request that drew another."""
        if one.wanted and run.version != one.wanted:
            yield Violation("a request that names a version is answered by another", f"{one}: {run.version} ran")
            return
        mates = [mate for mate, _ in self._mates[self._groups.of(one, place)]]
        before = [mate for mate in mates if mate.called <= run.began]
        asked = before or [mate for mate in mates if mate.called <= (one.returned or 0.0)]
        cached = not before and run.ended is not None and run.ended < min(mate.called for mate in asked)
        if any(self._may_be(mate, run, helped=not cached) for mate in asked):
            if len(asked) == 1 and not asked[0].wanted:
                yield from self._named(asked[0], run, asked[0].called if cached else run.began)
            return
        yield Violation(self._promise(asked, run, cached), f"{one}: {run.version} ran at {run.began:.3f}")

    def _may_be(self, one: Operation, run: Run, *, helped: bool) -> bool:
        """Return True if this run's version may answer the request."""
        until = _until(one)
        if one.wanted:
            return one.wanted == run.version
        if self._rollout.is_young(one.gateway, one.called):
            return True  # It may wait for any version.
        drawn = self._rollout.drawn(one.called, until)
        since = min(one.called, run.began)
        return run.version in drawn or (
            helped and any(self._rollout.bare(one.model, each, since, run.began) for each in drawn)
        )

    def _named(self, one: Operation, run: Run, ran: float) -> Iterator[Violation]:
        """Check that a key, an id and a list always draw the same version while the weights don't change."""
        if self._rollout.is_young(one.gateway, one.called):
            return
        due = self._rollout.named(one, ran)
        if due and due != run.version:
            yield Violation("another version than its name draws", f"{one}: {run.version} ran, {due} was due")

    def _promise(self, asked: Sequence[Operation], run: Run, cached: bool) -> str:
        if cached:
            return "a kept answer of a version that may not be drawn"
        weights = [each for one in asked for each in self._rollout.weights(one.called, _until(one))]
        if all(each.get(run.version) == 0.0 for each in weights):
            return "a version that drains runs a new request"
        return "an answer of a version that was not drawn"

    def _tellings(self) -> Iterator[Violation]:
        """Check that ledger and status give the version that ran."""
        told = defaultdict[tuple[str, str], list[Telling]](list)
        rows = [row for row in self._history.evidence.rows or () if row.status == "completed"]
        by_ledger = [Telling("the ledger", row.tenant, row.id, row.version) for row in rows]
        for telling in (*self._history.tellings, *by_ledger):
            told[telling.tenant, telling.id].append(telling)
        uses = defaultdict[tuple[str, str], list[Operation]](list)
        for one in self._history.operations:
            if one.kind in ASKS and one.id:
                uses[one.tenant, one.id].append(one)
        for name, [*asked] in uses.items():
            [first, *more] = asked
            ran = {run.version for output in first.answers if (run := self._runs.get(mark_of(output))) is not None}
            for telling in told[name] if ran and not more else ():
                if telling.version is None or set(telling.version.split(",")) != ran:
                    what = "nothing" if telling.version is None else f"version {telling.version!r}"
                    story = f"{first}: {what}, {', '.join(sorted(ran))} ran"
                    yield Violation(f"{telling.source} tells another version", story)


def _until(one: Operation) -> float:
    """Return the latest time at which a version is drawn for a request."""
    return one.returned if one.returned is not None else one.called + PATIENCE
