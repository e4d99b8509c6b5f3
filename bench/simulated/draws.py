"""Services and loads drawn at random. Each is determined by a seed and a number, so that any of them can be rerun alone."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from headway.simulator.scenario import Faults, Kill, QueueRules, Scenario, Step

REQUESTS, WARM_UP_REQUESTS = 15_000, 5_000
PATIENT = QueueRules(queue_timeout=30.0, timeout=30.0, max_queue=100_000)
"""Deadlines so late that they don't distort latencies."""
CLIENTS = (4, 16, 64)
KINDS = ("poisson", "poisson", "poisson", "death", "steps", "bursts", "closed", "cold")
"""Kinds of loads, in turn."""
COLD_BATCHES = 5
"""Minimum batch times of a cold start that count; it lasts at least a second."""
TOUR = 12.0
"""Mean requests of a synthetic burst, and of the lull after it."""

Traces = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scenario without its policy, the kind of its load, and the load as a share of the capacity."""

    name: str
    kind: str
    scenario: Scenario
    load: float
    traffic: str = ""


def full_seconds(scenario: Scenario) -> float:
    """Return the time of a full batch in seconds, on a GPU that isn't slow."""
    return scenario.alpha + scenario.beta * scenario.max_batch


def capacity(scenario: Scenario) -> float:
    """Return the maximum requests per second, including the slow GPU's."""
    return (scenario.workers - 1 + 1 / scenario.faults.slow) * scenario.max_batch / full_seconds(scenario)


def draw(seed: int, number: int, traces: Traces) -> Drawn:
    """Draw configuration `number` of a seed. Bursts are synthetic or from `traces`."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    workers, max_batch = rng.randint(2 if kind == "death" else 1, 8), rng.choice((16, 32, 64, 100))
    alpha = rng.choice((0.02, 0.05, 0.1, 0.2))
    beta = rng.choice((0.0, 0.0, 0.25, 0.5, 1.0, 2.0)) * alpha / max_batch
    slow = rng.choice((1.0, 1.0, 1.0, 1.0, 1.2, 1.5, 2.0, 3.0))
    fleet = Scenario(
        rate=1.0, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, jitter=rng.choice((0.0, 0.3)),
        faults=Faults(slow=1.0 if workers == 1 else slow), queue=PATIENT, seed=rng.randrange(1 << 30),
    )  # fmt: skip
    return with_load(str(number), kind, fleet, rng, traces)


def with_load(name: str, kind: str, fleet: Scenario, rng: random.Random, traces: Traces) -> Drawn:
    if kind == "closed":
        return closed(name, fleet, rng.choice(CLIENTS))
    load = rng.uniform(0.05, 0.95)
    if kind == "death":  # The remaining GPUs can carry it.
        load = min(load, 0.9 * (fleet.workers - 1) / fleet.workers)
    rate = load * capacity(fleet)
    if kind == "cold":
        return cold(name, fleet, rate)
    warmup = max(WARM_UP_REQUESTS / rate, 5.0)
    duration = warmup + max(REQUESTS / rate, 5.0)
    changes: dict[str, object] = {"rate": rate, "warmup": warmup, "duration": duration}
    traffic, length = "", duration - warmup
    if kind == "death":
        kills = (Kill(warmup + length / 3, 1),)
        changes["faults"] = replace(fleet.faults, kills=kills, restart=length / 3)
    elif kind == "steps":
        shares = [rng.uniform(0.05, 0.95) for _ in range(2)]
        steps = [Step(warmup + length * (at + 1) / 3, share * capacity(fleet)) for at, share in enumerate(shares)]
        changes["steps"] = tuple(steps)
    elif kind == "bursts":
        traffic = rng.choice(("synthetic", *sorted(traces)))
        trace = traces[traffic] if traffic in traces else synthetic(rng)
        # A recording's bursts are many times its mean rate: at a high load, only their backlog would count.
        changes["rate"] = rate = min(rate, 0.5 * capacity(fleet))
        lap = len(trace) / rate
        changes |= {"trace": trace, "warmup": lap, "duration": 2 * lap}
    return Drawn(name, kind, _changed(fleet, changes), rate / capacity(fleet), traffic)


def closed(name: str, fleet: Scenario, clients: int) -> Drawn:
    """Add clients to a fleet that wait for their answers."""
    cycle = full_seconds(fleet)
    changes = {"rate": 0.0, "clients": clients, "warmup": 20 * cycle, "duration": 120 * cycle}
    return Drawn(name, "closed", _changed(fleet, changes), 0.0)


def cold(name: str, fleet: Scenario, rate: float) -> Drawn:
    """Send a rate to a fleet that has only been warmed up."""
    seconds = max(1.0, COLD_BATCHES * full_seconds(fleet))
    changes = {"rate": rate, "warmup": 0.0, "duration": seconds}
    return Drawn(name, "cold", _changed(fleet, changes), rate / capacity(fleet))


def steady(name: str, fleet: Scenario, rate: float) -> Drawn:
    warmup = max(WARM_UP_REQUESTS / rate, 5.0)
    changes = {"rate": rate, "warmup": warmup, "duration": warmup + max(REQUESTS / rate, 5.0)}
    return Drawn(name, "poisson", _changed(fleet, changes), rate / capacity(fleet))


def synthetic(rng: random.Random) -> tuple[float, ...]:
    """Return arrival times: bursts of Poisson arrivals, with lulls of the same length between them."""
    gaps: list[float] = []
    while len(gaps) < REQUESTS // 2:
        burst = 1 + int(rng.expovariate(1.0 / TOUR))
        gaps += [rng.expovariate(2.0) for _ in range(burst - 1)] + [rng.expovariate(1.0 / TOUR) + 0.5]
    return tuple(accumulate(gaps))


def _changed(fleet: Scenario, changes: Mapping[str, object]) -> Scenario:
    return Scenario(**{**vars(fleet), **changes})


def _fleet(workers: int, alpha: float, beta: float = 0.0, max_batch: int = 64, slow: float = 1.0) -> Scenario:
    return Scenario(
        rate=1.0, workers=workers, alpha=alpha, beta=beta, max_batch=max_batch, faults=Faults(slow=slow), queue=PATIENT, seed=1,
    )  # fmt: skip


def named() -> tuple[Drawn, ...]:
    """Return configurations that once did badly, or that were requested by name."""
    six, small = _fleet(6, 0.1, 0.002), _fleet(2, 0.02, 0.002)
    return (
        *(
            steady(f"2 GPUs, one ×{slow:g}, 200 ms, 265/s", _fleet(2, 0.2, slow=slow), 265.0)
            for slow in (1.2, 1.5, 2, 3)
        ),
        steady("6 GPUs, 100 ms + 2 ms·n, 85 %", six, 0.85 * capacity(six)),
        *(closed(f"2 GPUs, 20 ms + 2 ms·n, {clients} clients", small, clients) for clients in CLIENTS),
        cold("6 GPUs, 100 ms + 2 ms·n, 85 %, cold", six, 0.85 * capacity(six)),
        cold("6 GPUs, 100 ms, ≤ 100, 60 %, cold", _fleet(6, 0.1, max_batch=100), 3600.0),
    )
