"""Advance rollouts, in the leading controller. `core/rollout` decides from the evidence that is kept here.

    read ──evidence of the gateways──▶ watched ──a step, an end, or some seconds──▶ kept ──▶ published with the capacity

The evidence is written to the broker now and then, so that the next leader can carry on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from headway.core.rollout import counted, watched
from headway.model import ProcessInfo, Rollout, RolloutState, VersionCounts
from headway.model.board import SlotChange
from headway.ports import Fleet
from headway.runtime.counters import ControllerCounts
from headway.runtime.logger import get_logger

log = get_logger(__name__)

KEEP_EVERY = 2.0
"""Seconds of evidence that may be lost with a leader."""
LONGEST_LOOK = 5.0
"""Most seconds that count between two looks, as nobody watches while the broker is away."""
STEP = "step"
"""Label of the metric for a new step. The state is the label of other changes."""

_Seen = dict[tuple[str, str, str], VersionCounts]
"""Counts by gateway, model and version."""


class RolloutLeader:
    """The rollouts of the fleet, in a controller that may lead it."""

    def __init__(self, fleet: Fleet, counters: ControllerCounts, clock: Callable[[], float]) -> None:
        self._fleet, self._counters, self._clock = fleet, counters, clock
        self._held: dict[str, Rollout] = {}
        self._kept_at: dict[str, float] = {}
        self._seen: _Seen | None = None
        """Counts of the gateways at the last look; None before the first."""
        self._looked_at = 0.0

    @property
    def asks(self) -> bool:
        """True if the next look needs the fleet's processes, because a rollout is running or it is the first look."""
        return self._seen is None or any(rollout.running for rollout in self._held.values())

    def begin(self) -> None:
        self._held.clear()
        self._seen = None

    async def look(self, kept: Sequence[Rollout], members: Sequence[ProcessInfo]) -> Mapping[str, Rollout]:
        """Advance the rollouts that the broker keeps, and return them by model for publication."""
        now = self._clock()
        seconds, self._looked_at = min(now - self._looked_at, LONGEST_LOOK), now
        first, news = self._seen is None, self._news(members)
        lost = self._held.keys() - {rollout.model for rollout in kept}
        for rollout in kept:
            held = self._held.get(rollout.model)
            if held is None or held.revision != rollout.revision:
                self._held[rollout.model] = rollout
                self._kept_at[rollout.model] = now
                if not first:
                    self._report(held, rollout)
        for model, rollout in [*self._held.items()]:
            after = rollout
            if rollout.running and not first:
                new = news.get((model, rollout.version), VersionCounts())
                old = news.get((model, rollout.beside), VersionCounts())
                after = watched(rollout, seconds, new, old)
            await self._keep(rollout, after, now, lost=model in lost)
        if not self.asks:
            self._seen = {}
        return self._held

    async def _keep(self, before: Rollout, after: Rollout, now: float, *, lost: bool) -> None:
        """Write a rollout back if it has changed. If an operator has changed it meanwhile, the next look follows the operator."""
        moved = (before.state, before.step) != (after.state, after.step)
        if moved or lost or (after.running and now - self._kept_at[after.model] >= KEEP_EVERY):
            after = replace(after, revision=after.revision + 1)
            if not await self._fleet.keep_rollout(after):
                return
            self._kept_at[after.model] = now
            if moved:
                self._report(before, after)
        self._held[after.model] = after

    def _news(self, members: Sequence[ProcessInfo]) -> Mapping[tuple[str, str], VersionCounts]:
        """Return the counts of all gateways since the last look, by model and version. A restarted gateway counts from zero."""
        before, news = self._seen or {}, dict[tuple[str, str], VersionCounts]()
        self._seen = dict(before)  # A gateway that is silent for a while may come back.
        for member in members:
            for model, versions in member.versions.items():
                for version, counts in versions.items():
                    key = member.id, model, version
                    self._seen[key] = counts
                    last = before.get(key, VersionCounts())
                    more = _since(counts, last if last.count <= counts.count else VersionCounts())
                    news[model, version] = counted(news.get((model, version), VersionCounts()), more)
        return news

    def _report(self, before: Rollout | None, after: Rollout) -> None:
        if before is not None and _place(before) == _place(after):
            return
        model, version, state = after.model, after.version, after.state
        self._counters.rollout_changes[model, STEP if after.running else state.value] += 1
        status = f"at {after.percent:g} %" if after.running else state.value
        change = SlotChange(f"rollout of {model}@{version}", model, status, 0, cause=after.reason)
        self._counters.departures.changed(change)
        write = log.error if state is RolloutState.ROLLED_BACK else log.info
        write(f"a rollout is {status}", model=model, version=version, beside=after.beside, reason=after.reason)


def _place(rollout: Rollout) -> tuple[object, ...]:
    """Return the identity of a rollout and its progress, to compare them."""
    return rollout.version, rollout.beside, rollout.steps, rollout.state, rollout.step


def _since(counts: VersionCounts, last: VersionCounts) -> VersionCounts:
    grown = {bucket: count - last.latencies.get(bucket, 0) for bucket, count in counts.latencies.items()}
    latencies = {bucket: count for bucket, count in grown.items() if count > 0}
    return VersionCounts(counts.answered - last.answered, counts.failed - last.failed, latencies)
