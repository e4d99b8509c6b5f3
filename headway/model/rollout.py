"""Rollouts: a new version of a model receives a growing share of the requests while evidence about it is collected."""

from __future__ import annotations

import enum

import msgspec


class RolloutState(enum.Enum):
    """State of a rollout. Every state except RUNNING is final. In a final state the losing version receives no more requests."""

    RUNNING = "running"
    PROMOTED = "promoted"
    ABORTED = "aborted"
    ROLLED_BACK = "rolled back"


class VersionCounts(msgspec.Struct, frozen=True, array_like=True):
    """Finished requests of one version. `failed` counts those that failed after admission. `latencies` counts answered requests by
    bucket (see `headway.core.rollout.bucket_of`)."""

    answered: int = 0
    failed: int = 0
    latencies: dict[int, int] = {}

    @property
    def count(self) -> int:
        return self.answered + self.failed


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Requests of the new and the old version that finished within the same `seconds`, for comparison."""

    seconds: float = 0.0
    new: VersionCounts = VersionCounts()
    old: VersionCounts = VersionCounts()


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """Evidence from one step of a rollout."""

    # Requests of the new and the old version in this step.
    new: VersionCounts = VersionCounts()
    old: VersionCounts = VersionCounts()
    # Logarithms of the bets on each alternative, for the failure test and the latency test.
    failures: tuple[float, ...] = ()
    p95: tuple[float, ...] = ()
    # Unfinished blocks of the two tests.
    outcomes: Block = Block()
    latencies: Block = Block()
    # Sum over blocks of the old version's share of slow answers, and number of blocks.
    slow: tuple[float, int] = (0.0, 0)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The last rollout of a model."""

    model: str
    version: str  # New version.
    beside: str  # Old version that the new version is compared with.
    steps: tuple[float, ...]  # Percentage of the requests that the new version receives in each step.
    every: float  # Length of a step in seconds.
    rollback_on: tuple[str, ...]  # Tests from `headway.core.rollout.TESTS` that may end the rollout.
    slower: float  # How much the new version's P95 may exceed the old version's, as a share of the latter.
    state: RolloutState = RolloutState.RUNNING
    step: int = 0  # Number of the current step, from 0.
    waited: float = 0.0  # Seconds of this step that a leader has observed.
    reason: str = ""  # Why the rollout ended.
    revision: int = 1  # Number of changes of this record.
    evidence: Evidence = Evidence()
    # Weights left by earlier rollouts: 100 for the last promoted version, 0 for rejected versions.
    before: dict[str, float] = {}

    @property
    def running(self) -> bool:
        return self.state is RolloutState.RUNNING

    @property
    def percent(self) -> float:
        if self.running:
            return self.steps[self.step]
        return 100.0 if self.state is RolloutState.PROMOTED else 0.0
