"""Batcher as stands of services build it, for one slot."""

from collections.abc import Callable
from typing import Any

from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.departure import Policy
from headway.model import Slot
from headway.ports import Backend, WorkSource
from headway.runtime.counters import WorkerCounts
from headway.worker.batcher import Batcher
from headway.worker.starting import Limits
from tests.virtual_time import Clock


def make_batcher(
    slot: Slot,
    make_backend: Callable[[], Backend],
    broker: WorkSource,
    counters: WorkerCounts,
    clock: Clock,
    policy: Policy | None = None,
    breaker: Breaker | None = None,
    gpu_timeout: float = 3.0,
    **others: Any,
) -> Batcher:
    """Sends at once what waits, unless there is a policy; `others` are those of a `Batcher`."""
    chosen = policy or policies.build("window", 0.0)
    limits = Limits(gpu_timeout)
    others = {"rng": lambda: 0.5, **others}
    return Batcher(slot, make_backend, broker, chosen, breaker or Breaker(5, 0.5), limits, counters, clock, **others)
