"""Rollouts under way, as the leading controller moves them on.

    read ──evidence of the gateways──▶ watched ──a step, an end, or some seconds──▶ kept ──▶ published with the capacity

`core/rollout` decides. What it goes by is kept in the broker now and then, so that another leader goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from headway.core.rollout import counted, watched
from headway.model import ProcessInfo, Rollout, RolloutState, VersionCounts
from headway.model.board import SlotChange
from headway.ports import Fleet
from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger

log = get_logger(__name__)

KEEP_EVERY = 2.0
"""Seconds of evidence that are lost at most with a leader."""
LONGEST_LOOK = 5.0
"""Seconds that count at most between two looks: nobody has watched while the broker was away."""

STEP = "step"
"""Change of a rollout that has begun a step; of any other change the name is the state."""

_Seen = dict[tuple[str, str, str], VersionCounts]
"""Counts by gateway, model and version."""


class RolloutLeader:
    """Rollouts of a fleet, in the controller that may lead it.

    Arguments:
        fleet: fleet that keeps them.
        counters: counters of the process.
        clock: monotonic seconds.
    """

    def __init__(self, fleet: Fleet, counters: Counters, clock: Callable[[], float]) -> None:
        self._fleet, self._counters, self._clock = fleet, counters, clock
        self._held: dict[str, Rollout] = {}
        """Rollouts with the newest evidence, by model."""
        self._kept_at: dict[str, float] = {}
        self._seen: _Seen | None = None
        """Counts of the gateways at the last look; None before the first one."""
        self._looked_at = 0.0

    @property
    def asks(self) -> bool:
        """Whether the next look needs the processes of the fleet: one was under way at the last, or there was none yet."""
        return self._seen is None or any(one.running for one in self._held.values())

    def begin(self) -> None:
        """Begin to lead, from what is kept in the broker."""
        self._held.clear()
        self._seen = None

    async def look(self, kept: Sequence[Rollout], members: Sequence[ProcessInfo]) -> Mapping[str, Rollout]:
        """Move all rollouts on; returns them by model, as they are to be published.

        Arguments:
            kept: rollouts as they were read from the broker.
            members: processes of the fleet.
        """
        now = self._clock()
        seconds, self._looked_at = min(now - self._looked_at, LONGEST_LOOK), now
        first, news = self._seen is None, self._news(members)
        lost = self._held.keys() - {one.model for one in kept}
        for one in kept:
            held = self._held.get(one.model)
            if held is None or held.revision != one.revision:
                self._held[one.model] = one
                self._kept_at[one.model] = now
                if not first:
                    self._tell(held, one)
        for model, one in [*self._held.items()]:
            after = one
            if one.running and not first:
                new, old = (news.get((model, version), VersionCounts()) for version in (one.version, one.beside))
                after = watched(one, seconds, new, old)
            await self._keep(one, after, now, lost=model in lost)
        if not self.asks:
            self._seen = {}
        return self._held

    async def _keep(self, before: Rollout, after: Rollout, now: float, *, lost: bool) -> None:
        """Keep a rollout where it has changed. Where an operator has changed it meanwhile, that holds with the next look."""
        moved = (before.state, before.step) != (after.state, after.step)
        if moved or lost or (after.running and now - self._kept_at[after.model] >= KEEP_EVERY):
            after = replace(after, revision=after.revision + 1)
            if not await self._fleet.keep_rollout(after):
                return
            self._kept_at[after.model] = now
            if moved:
                self._tell(before, after)
        self._held[after.model] = after

    def _news(self, members: Sequence[ProcessInfo]) -> Mapping[tuple[str, str], VersionCounts]:
        """Counts since the last look, of all gateways together. Of one that has begun anew all counts."""
        before, news = self._seen or {}, dict[tuple[str, str], VersionCounts]()
        self._seen = dict(before)  # One that is not heard of for a while may come back.
        for member in members:
            for model, versions in member.versions.items():
                for version, counts in versions.items():
                    key = member.id, model, version
                    self._seen[key] = counts
                    last = before.get(key, VersionCounts())
                    more = _less(counts, last if last.count <= counts.count else VersionCounts())
                    news[model, version] = counted(news.get((model, version), VersionCounts()), more)
        return news

    def _tell(self, before: Rollout | None, after: Rollout) -> None:
        """Tell of a change by a line of the log, an event on the board, and a count."""
        if before is not None and _place(before) == _place(after):
            return
        model, version, state = after.model, after.version, after.state
        self._counters.rollout_changes[model, STEP if after.running else state.value] += 1
        status = f"at {after.percent:g} %" if after.running else state.value
        self._counters.departures.changed(
            SlotChange(f"rollout of {model}@{version}", model, status, 0, cause=after.reason)
        )
        say = log.error if state is RolloutState.ROLLED_BACK else log.info
        say(f"a rollout is {status}", model=model, version=version, beside=after.beside, reason=after.reason)


def _place(rollout: Rollout) -> tuple[object, ...]:
    """Identity of a rollout, and how far it is."""
    return rollout.version, rollout.beside, rollout.steps, rollout.state, rollout.step


def _less(counts: VersionCounts, last: VersionCounts) -> VersionCounts:
    """Growth of counts since the last ones."""
    grown = {bucket: count - last.latencies.get(bucket, 0) for bucket, count in counts.latencies.items()}
    latencies = {bucket: count for bucket, count in grown.items() if count > 0}
    return VersionCounts(counts.answered - last.answered, counts.failed - last.failed, latencies)
