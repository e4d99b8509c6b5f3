"""Choice of the version that answers each request of one model, and what is refused for its version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import monotonic

from headway.core import failures
from headway.core.health import UNKNOWN_FOR
from headway.core.rollout import weights_of
from headway.core.versions import Versions, Weights, position_of, versions_of
from headway.gateway.pending import SeveralInputs
from headway.model import Failure, RequestOptions, Rollout, WorkerInfo, WorkerStatus


class VersionChoice:
    """Versions of one model, as this gateway has heard of them.

    Arguments:
        configured: version that the settings name, until workers report theirs.
        weights: weights by version.
        rng: uniform in [0, 1).
        clock: monotonic seconds.

    Attributes:
        any: whether all requests that name no version may be answered by any worker, as none claims for a version.
        label: version by which identical requests share answers, where `any` holds.
        weights: weights by version that hold now.
        rollout: last rollout of the model; None where there was none.
    """

    __slots__ = (
        "_clock", "_configured", "_lost", "_named", "_rng", "_there", "_versions", "_workers", "any", "label", "rollout", "weights",
    )  # fmt: skip

    def __init__(
        self, configured: str, weights: Weights, rng: Callable[[], float], clock: Callable[[], float] = monotonic
    ) -> None:
        self._configured = self.weights = weights
        self._rng, self._clock = rng, clock
        self.rollout: Rollout | None = None
        self._there: Collection[str] = ()
        """Versions of the workers that were there at the last look."""
        self._lost: dict[str, float] = {}
        """Until when each version that the registry has lost is not known, in monotonic seconds."""
        self.any, self.label = True, configured
        self._named: Sequence[str] = (configured,)
        self._versions: Versions | None = None
        self._workers: Sequence[WorkerInfo] = ()

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of the model's workers. While there is none, what was known of them holds."""
        self._workers = workers = workers or self._workers
        self._note_lost(workers)
        self.weights = self._weights()
        versions = versions_of(workers, self.weights)
        if versions is not None:
            self.any, self._versions = False, versions
            return
        if self._versions is None and _have_left(workers):
            self.any, self._versions = False, Versions({}, (), self.weights)
            return
        named = {one.runs.version for one in workers if one.status is WorkerStatus.HEALTHY and one.runs.version}
        if named:  # Of two at once an answer may come from either; so neither's outcomes are taken.
            self.any, self._versions = True, None
            self._named, self.label = sorted(named), ",".join(sorted(named))

    def _note_lost(self, workers: Sequence[WorkerInfo]) -> None:
        """Note which versions were there, and are nowhere in the registry any more."""
        now, told = self._clock(), {worker.version or worker.runs.version for worker in workers}
        self._lost = {version: until for version, until in self._lost.items() if until > now and version not in told}
        self._lost |= {version: now + UNKNOWN_FOR for version in self._there if version not in told}
        self._there = {
            worker.version or worker.runs.version for worker in workers if worker.status is not WorkerStatus.OFFLINE
        }

    @property
    def sole(self) -> str | None:
        """Version in whose queue all requests that name none wait, empty for any; None where versions are drawn."""
        return "" if self._versions is None else self._versions.only

    @property
    def absent(self) -> Sequence[str]:
        """Versions that have a weight and no worker."""
        return self._versions.absent if self._versions is not None else ()

    def weigh(self, weights: Weights) -> None:
        """Go by other weights from now on, as far as no rollout says others."""
        self._configured = weights
        self.roll(self.rollout)

    def roll(self, rollout: Rollout | None) -> bool:
        """Go by a rollout from now on; whether that has changed the weights."""
        self.rollout = rollout
        if self._weights() == self.weights:
            return False
        self.learn(self._workers)
        return True

    def _weights(self) -> Weights:
        return weights_of(self.rollout, self._configured, self._there)

    def version(self, tenant: str, id: str, options: RequestOptions, several: SeveralInputs | None) -> str:
        """Version in whose queue a request waits; empty: any.

        A request that may be sent again to be answered once gets the same version each time. All inputs of one get the
        version that is drawn with the first, also if the weights change meanwhile.
        """
        if several is None or several.version is None:
            version = self._chosen(tenant, id, options, several is not None)
            if several is None:
                return version
            several.version = version
        return several.version

    def _chosen(self, tenant: str, id: str, options: RequestOptions, again: bool) -> str:
        """Version of a request, or of the first input of one with several. `again`: it gets the same when it is sent again."""
        versions = self._versions
        if versions is None:
            return ""
        if options.version:
            return options.version
        if versions.only is not None:
            return versions.only
        if again or options.key or options.chosen or options.task:
            return versions.drawn(position_of(tenant, options.key or id))
        return versions.drawn(self._rng())

    def refusal(self, model: str, version: str, in_doubt: bool) -> Failure | None:
        """Refusal of a request that names a version; None where that takes requests. `in_doubt`: see ServedModels."""
        if self._versions is None:
            taken, there = list(self._named) == [version], self._named
        else:
            taken, there = self._versions.takes(version), self._versions.open
        if taken:
            return None
        if (in_doubt or self._lost.get(version, 0.0) > self._clock()) and self.weights.get(version) != 0.0:
            return failures.version_unknown(model, version)
        return failures.no_version(model, version, there)


def _have_left(workers: Sequence[WorkerInfo]) -> bool:
    """Whether all workers are gone, and some claimed for a version. So may the next one, and for another.

    What names a version must not wait in the queue that is any version's, then.
    """
    return any(one.version for one in workers) and all(one.status is WorkerStatus.OFFLINE for one in workers)
