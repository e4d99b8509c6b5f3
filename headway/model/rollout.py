"""Rollouts: a new version of a model gets a growing share of its requests while evidence about it is collected."""

from __future__ import annotations

import enum

import msgspec


class RolloutState(enum.Enum):
    """State of a rollout. Every state but RUNNING is final. The losing version then gets no more requests."""

    RUNNING = "running"
    PROMOTED = "promoted"
    ABORTED = "aborted"
    ROLLED_BACK = "rolled back"


class VersionCounts(msgspec.Struct, frozen=True, array_like=True):
    """Finished requests of one version. Failed requests got an error after admission. `latencies` counts answered requests by
    bucket of `headway.core.rollout.bucket_of`."""

    answered: int = 0
    failed: int = 0
    latencies: dict[int, int] = {}

    @property
    def count(self) -> int:
        return self.answered + self.failed


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Requests of the new and the old version that ended within the same `seconds`, for comparison."""

    seconds: float = 0.0
    new: VersionCounts = VersionCounts()
    old: VersionCounts = VersionCounts()


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """Evidence of one step of a rollout."""

    # Requests in this step of the new and the old version.
    new: VersionCounts = VersionCounts()
    old: VersionCounts = VersionCounts()
    # Logarithms of the bets on each alternative, for the test of failures and the test of latency.
    failures: tuple[float, ...] = ()
    p95: tuple[float, ...] = ()
    # Open blocks of the two tests.
    outcomes: Block = Block()
    latencies: Block = Block()
    slow: tuple[float, int] = (0.0, 0)  # Sum and number of the old version's shares of slow answers in each block.


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The last rollout of a model."""

    model: str
    version: str  # New version.
    beside: str  # Old version, with which the new version is compared.
    steps: tuple[float, ...]  # Percentage of the requests that the new version gets in each step.
    every: float  # Seconds of a step.
    rollback_on: tuple[str, ...]  # Tests of `headway.core.rollout.TESTS` that may end it.
    slower: float  # Share of the old version's P95 by which the new version's P95 may exceed it.
    state: RolloutState = RolloutState.RUNNING
    step: int = 0  # Number of the present step, from 0.
    waited: float = 0.0  # Seconds of this step that a leader has observed.
    reason: str = ""  # Why the rollout ended.
    revision: int = 1  # Number of changes of this record.
    evidence: Evidence = Evidence()
    # Weights left by earlier rollouts, which are 100 for the last promoted version and 0 for rejected versions.
    before: dict[str, float] = {}

    @property
    def running(self) -> bool:
        return self.state is RolloutState.RUNNING

    @property
    def percent(self) -> float:
        if self.running:
            return self.steps[self.step]
        return 100.0 if self.state is RolloutState.PROMOTED else 0.0
