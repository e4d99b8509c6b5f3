"""Counts of requests by version, of models with a rollout under way: nothing is counted for any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headway.core.rollout import bucket_of
from headway.gateway.pending import Ending, PendingRequest
from headway.model import Rollout, VersionCounts

_COUNTED = (Ending.REPLIED, Ending.ANSWERED, Ending.TIMED_OUT)
"""Endings that tell something of a version."""


class _Sums(msgspec.Struct):
    """Requests of one version so far."""

    answered: int = 0
    failed: int = 0
    latencies: dict[int, int] = msgspec.field(default_factory=dict)


class RolloutCounts:
    """Observer that counts for rollouts, while there is any.

    Arguments:
        observe: called with these counts, and whether they are told of requests from now on.
    """

    def __init__(self, observe: Callable[[RolloutCounts, bool], None]) -> None:
        self._observe = observe
        self._of_models: dict[str, dict[str, _Sums]] = {}

    def follow(self, rollouts: Sequence[Rollout]) -> None:
        """Count for these rollouts, and for no others."""
        wanted = {one.model: {one.version, one.beside} for one in rollouts if one.running}
        before, self._of_models = self._of_models, {
            model: own if (own := self._of_models.get(model, {})).keys() == versions else {each: _Sums() for each in versions}
            for model, versions in wanted.items()
        }  # fmt: skip
        if bool(before) is not bool(self._of_models):
            self._observe(self, bool(self._of_models))

    @property
    def active(self) -> bool:
        """Whether there is any."""
        return bool(self._of_models)

    @property
    def counts(self) -> dict[str, dict[str, VersionCounts]]:
        """Requests that have ended, by model and version, since its rollout began."""
        return {
            model: {
                version: VersionCounts(one.answered, one.failed, dict(one.latencies)) for version, one in own.items()
            }
            for model, own in self._of_models.items()
        }

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count requests by the version that was chosen for them; see `headway.gateway.pending.Observer`.

        An answer that another request's run has brought tells nothing. Nor does one that names its version: whoever sends bad inputs to the
        new version alone would have it rolled back.
        """
        if ending not in _COUNTED:
            return
        for request in requests:
            entry, reply = request.entry, request.reply
            sums = self._of_models.get(entry.model, {}).get(entry.version)
            if sums is None or reply.shared is not None or entry.pinned:
                continue
            if reply.failure is not None:
                sums.failed += 1
                continue
            sums.answered += 1
            bucket = bucket_of(now - request.since)
            sums.latencies[bucket] = sums.latencies.get(bucket, 0) + 1
