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
    """Finished requests of one version."""

    answered: int = 0
    failed: int = 0  # Requests that failed after admission.
    latencies: dict[int, int] = {}  # Answered requests by bucket; see `headway.core.rollout.bucket_of`.

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

    new: VersionCounts = VersionCounts()  # Requests of the new version in this step.
    old: VersionCounts = VersionCounts()  # Requests of the old version in this step.
    failures: tuple[float, ...] = ()  # Logarithms of the bets on each alternative, for the failure test.
    p95: tuple[float, ...] = ()  # Logarithms of the bets on each alternative, for the latency test.
    outcomes: Block = Block()  # Unfinished block of the failure test.
    latencies: Block = Block()  # Unfinished block of the latency test.
    slow: tuple[float, int] = (0.0, 0)  # Sum over blocks of the old version's share of slow answers; number of blocks.


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
    before: dict[str, float] = {}  # Weights from earlier rollouts: 100 for the last promoted version, 0 if rejected.

    @property
    def running(self) -> bool:
        return self.state is RolloutState.RUNNING

    @property
    def percent(self) -> float:
        if self.running:
            return self.steps[self.step]
        return 100.0 if self.state is RolloutState.PROMOTED else 0.0
