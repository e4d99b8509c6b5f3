"""Size of a fleet: the fewest slots that keep a latency promise, by a formula. `headway plan` starts its search here and confirms
the result by simulation. The autoscaler's policy `plan` uses only the formula (`scaler`).

With batch time ℓ(n) = α + βn, k slots and arrivals at rate λ, `paced` lets batches of n = λs leave every s = α/(k − βλ)
(`core/policies/paced.py`). A request waits up to s for its batch, then ℓ(n) for its answer. Backlogs that arise by chance are
added. The slots handle at most μ = kB/ℓ(B). For arrivals with dispersion c (variance over mean of their counts; 1 for Poisson), the
backlog is roughly exponential with mean cλ/(2(μ − λ)) entries (heavy traffic; Kingman, 1962). Run times that vary by δ add ρBδ²/ℓ²
to c. If arrivals are too few to be spaced, a request waits only if all slots are busy.

Each process computes its own share of a model's workers from the same numbers, without a coordinator. Moving a worker would cost a
start. So missing workers are added where there is most room, and surplus workers are removed where there are most.

If models take turns in one process's places, each of them may use the free places. If a model waits for a place, the model with the
most workers gives one up. If each of them has only one, all models without requests give up their last."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

P95 = 0.95
NORMAL_95 = 1.645  # Standard deviations above the mean below which 95 % of a normal distribution lie.
EXPONENTIAL_95 = 3.0  # Multiple of the mean below which 95 % of an exponential distribution lie.
MOST_SLOTS = 10_000


class BatchCost(msgspec.Struct, frozen=True):
    """Cost of a model's batches."""

    alpha: float  # Fixed part of a batch's time in seconds, including the pause between two batches.
    beta: float  # Seconds per unit of size.
    max_batch: float  # Size of a full batch.
    deviation: float = 0.0  # Standard deviation of a batch's time in seconds.
    most_wait: float = math.inf  # Longest time in seconds that the departure policy lets a request wait for others.

    @property
    def full_seconds(self) -> float:
        return self.alpha + self.beta * self.max_batch

    @property
    def pace(self) -> float:
        """Units of size per second that one slot handles in full batches."""
        return self.max_batch / self.full_seconds


def latency_p95(cost: BatchCost, rate: float, slots: int, dispersion: float = 1.0) -> float:
    """Return the 95th percentile of latency in seconds at `rate` (λ, in size per second); infinite if the slots can't keep up."""
    capacity = slots * cost.pace
    if rate >= capacity:
        return math.inf
    gap = min(cost.alpha / (slots - cost.beta * rate), cost.full_seconds / slots)
    if rate * cost.alpha / slots < 1.0:
        size, wait = 1.0, _busy_wait(cost, rate, slots)
    else:
        size, wait = max(rate * gap, 1.0), P95 * min(gap, cost.most_wait)
    run = cost.alpha + cost.beta * min(size, cost.max_batch)
    varied = dispersion + (rate / capacity) * cost.max_batch * (cost.deviation / run) ** 2
    backlog = EXPONENTIAL_95 * varied * rate / (2.0 * (capacity - rate)) / capacity
    # These waits rarely coincide, but everybody waits for part of the gap, and slow batches meet full queues.
    waits = math.hypot(wait, backlog) if backlog < wait else wait + backlog
    return run + waits + NORMAL_95 * cost.deviation


def _busy_wait(cost: BatchCost, rate: float, slots: int) -> float:
    """Return the 95th percentile of the wait for a slot if arrivals are too few to be spaced."""
    run = cost.alpha + cost.beta
    busy = min(rate * run / slots, 1.0) ** slots
    return max(0.0, 1.0 - (1.0 - P95) / busy) * run / slots if busy > 0.0 else 0.0


def fewest_slots(
    cost: BatchCost, rate: float, promise: float, dispersion: float = 1.0, most: int = MOST_SLOTS
) -> int | None:
    """Return the fewest slots whose `latency_p95` is at most `promise` seconds, or None if no number up to `most` achieves it."""
    low = math.floor(rate / cost.pace) + 1
    if low > most or latency_p95(cost, rate, most, dispersion) > promise:
        return None
    high, step = low, 1
    while latency_p95(cost, rate, high, dispersion) > promise:
        low, high, step = high + 1, min(high + step, most), step * 2
    while low < high:
        middle = (low + high) // 2
        if latency_p95(cost, rate, middle, dispersion) <= promise:
            high = middle
        else:
            low = middle + 1
    return high


def shares(desired: int, processes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Share `desired` workers out to `processes`, given the current number and limit of each. Each process gets at least one,
    unless `desired` is 0."""
    if desired <= 0:
        return dict.fromkeys(processes, 0)
    has = {id: max(min(present, most), 1) for id, (present, most) in processes.items()}
    room = {id: max(most, 1) for id, (_, most) in processes.items()}
    missing = desired - sum(has.values())
    for _ in range(missing):
        open_ = [id for id in has if has[id] < room[id]]
        if not open_:
            break
        has[min(open_, key=lambda id: (has[id] / room[id], id))] += 1
    for _ in range(-missing):
        spare = [id for id in has if has[id] > 1]
        if not spare:
            break
        has[max(spare, key=lambda id: (has[id] / room[id], id))] -= 1
    return has


class Holding(msgspec.Struct, frozen=True):
    """The places of one model in a process: how many it has, wants, and may have."""

    has: int
    wants: int
    most: int


def rooms(holdings: Mapping[str, Holding], free: int, coming: int) -> dict[str, int]:
    """Return the largest number of workers that each model may want. `coming` places are being given up, but aren't free yet."""
    largest_wanted = {
        model: min(max(holding.has + free, holding.wants), holding.most) for model, holding in holdings.items()
    }
    waited_for = sum(max(holding.wants - holding.has, 0) for holding in holdings.values()) - coming - free
    givers = {model: holding.has for model, holding in holdings.items() if 0 < holding.has >= holding.wants}
    if waited_for <= 0 or not givers:
        return largest_wanted
    largest = max(givers, key=lambda model: givers[model])
    giving = [largest] if givers[largest] > 1 else givers
    return largest_wanted | {model: givers[model] - 1 for model in giving}
