"""Choice of the model version that answers each request."""

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
    """Versions of one model, as far as this gateway knows. Until workers report versions, the `configured` one counts.

    Attributes:
        any: True if any worker may answer requests that name no version, because no worker claims by version.
        label: version for sharing answers between identical requests while `any` is True.
        weights: current weights by version. A rollout overrides the weights of the settings.
        rollout: last rollout of the model; None if there was none.
    """

    __slots__ = (
        "_clock", "_configured", "_lost", "_named", "_present", "_rng", "_versions", "_workers", "any", "label", "rollout", "weights",
    )  # fmt: skip

    def __init__(
        self, configured: str, weights: Weights, rng: Callable[[], float], clock: Callable[[], float] = monotonic
    ) -> None:
        self._configured = self.weights = weights
        self._rng, self._clock = rng, clock
        self.rollout: Rollout | None = None
        self._present: Collection[str] = ()
        """Versions with workers at the last look."""
        self._lost: dict[str, float] = {}
        """Versions that vanished from the registry, with the instants until which they may come back."""
        self.any, self.label = True, configured
        self._named: Sequence[str] = (configured,)
        self._versions: Versions | None = None
        self._workers: Sequence[WorkerInfo] = ()

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Update from the model's workers. If there are no workers, the former ones still count."""
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
        named = {
            worker.runs.version for worker in workers if worker.status is WorkerStatus.HEALTHY and worker.runs.version
        }
        if named:  # With two versions, either may answer, so the label names both.
            self.any, self._versions = True, None
            self._named, self.label = sorted(named), ",".join(sorted(named))

    def _note_lost(self, workers: Sequence[WorkerInfo]) -> None:
        now, known = self._clock(), {worker.version or worker.runs.version for worker in workers}
        self._lost = {version: until for version, until in self._lost.items() if until > now and version not in known}
        self._lost |= {version: now + UNKNOWN_FOR for version in self._present if version not in known}
        self._present = {
            worker.version or worker.runs.version for worker in workers if worker.status is not WorkerStatus.OFFLINE
        }

    @property
    def sole(self) -> str | None:
        """Version for all requests that name no version. It is empty for the shared queue, and None if versions are drawn."""
        return "" if self._versions is None else self._versions.only

    @property
    def absent(self) -> Sequence[str]:
        """Versions with a weight and no worker."""
        return self._versions.absent if self._versions is not None else ()

    def weigh(self, weights: Weights) -> None:
        """Set the weights that count without a rollout."""
        self._configured = weights
        self.roll(self.rollout)

    def roll(self, rollout: Rollout | None) -> bool:
        """Follow a rollout. Returns True if that changes the weights."""
        self.rollout = rollout
        if self._weights() == self.weights:
            return False
        self.learn(self._workers)
        return True

    def _weights(self) -> Weights:
        return weights_of(self.rollout, self._configured, self._present)

    def version(self, tenant: str, id: str, options: RequestOptions, several: SeveralInputs | None) -> str:
        """Return the version whose queue a request joins; empty for the shared queue.

        All inputs of a list get the version drawn for the first, even if the weights change in between. Requests that a client
        may repeat for the same answer get the same version each time.
        """
        if several is None:
            return self._chosen(tenant, id, options, again=False)
        if several.version is None:
            several.version = self._chosen(tenant, id, options, again=True)
        return several.version

    def _chosen(self, tenant: str, id: str, options: RequestOptions, again: bool) -> str:
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
        """Return the refusal of a request for a version; None if the version takes requests. `in_doubt`: see ServedModels."""
        if self._versions is None:
            taken, open_versions = list(self._named) == [version], self._named
        else:
            taken, open_versions = self._versions.takes(version), self._versions.open
        if taken:
            return None
        if (in_doubt or self._lost.get(version, 0.0) > self._clock()) and self.weights.get(version) != 0.0:
            return failures.version_unknown(model, version)
        return failures.no_version(model, version, open_versions)


def _have_left(workers: Sequence[WorkerInfo]) -> bool:
    """Return True if all workers are gone, and some claimed by version.

    The next worker may claim by another version, so requests that name a version mustn't join the shared queue.
    """
    return any(worker.version for worker in workers) and all(
        worker.status is WorkerStatus.OFFLINE for worker in workers
    )
