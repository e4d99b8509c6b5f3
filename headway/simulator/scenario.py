"""Scenario to simulate: a frozen dataclass, validated on creation. All times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass

import msgspec

from headway.config import FIELDS
from headway.config.fields import check_options, check_within, tool_option, tool_options_of
from headway.config.settings import MAX_BATCH, MOST_WEIGHT
from headway.core import policies
from headway.core.departure import Load, Policy, Rule
from headway.core.excerpt import nearest
from headway.core.queue import NEAR_BATCHES
from headway.core.queue_limits import QueueLimits
from headway.errors import SettingError
from headway.simulator.batch_times import BatchTimes

POLICIES = (*policies.NAMES, "eager")  # The production policies, and one for comparison.
EVERYBODY = "all"  # Name of the only tier if there is no mix.
LENGTHS_HINT = "Give --lengths, such as 5-250, or a file with one length per line or one from headway check --record."
WEIGHTS_HINT = "Give --weights, such as 5-250, or a file with one weight per line."
USUAL_MIX: Mapping[str, float] = {"enterprise": 5.0, "paid": 25.0, "free": 70.0}

_LOAD, _MODEL, _BATCHING, _FLEET = "Load", "Model and GPUs", "Batching", "Gateways and shards"
_FAILURES, _RESULT = "Failures", "Results"
_MAX_RATE = 1_000_000.0


class Eager:
    """Policy that never holds a batch back, only for comparison with the production policies."""

    def rule(self, load: Load) -> Rule:
        return Rule(size=load.max_batch, headway=0.0)


class Step(msgspec.Struct, frozen=True):
    """Change of the arrival rate. From `at` on, `rate` requests arrive per second."""

    at: float
    rate: float


class Kill(msgspec.Struct, frozen=True):
    """At time `at`, `workers` workers die. If `silent`, nobody notices until heartbeats are missed and leases expire."""

    at: float
    workers: int
    silent: bool = False


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Workers that are slow or die, and inputs that cause their batches to fail."""

    slow: float = tool_option(1.0, "--slow", "X", _FAILURES,
        "How many times as long the first GPU takes.", within=(0.01, 100))
    fail_every: float = tool_option(0.0, "--fail-every", "S", _FAILURES,
        "Mean seconds between deaths of a worker; 0: never.", unit="s", within=(0, 31_536_000))
    kills: tuple[Kill, ...] = tool_option((), "--kill", "S=N", _FAILURES,
        "At second S, N workers die. Repeatable.", type=str, multiple=True)
    restart: float = tool_option(5.0, "--restart-s", "S", _FAILURES,
        "Seconds until a dead worker is back.", unit="s", within=(0, 86_400))
    poison: float = tool_option(0.0, "--poison", "X", _FAILURES,
        "Share of inputs that cause any batch with them to fail.", within=(0, 1))


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """Time limits of requests, their promised latency, and limits of the queue."""

    max_wait: float | None = tool_option(None, "--max-wait-ms", "MS", _BATCHING,
        FIELDS["max_wait_ms"].help, unit="ms", per=1000, within=(0, 60_000))
    queue_timeout: float = tool_option(2.0, "--queue-timeout-ms", "MS", _BATCHING,
        "Longest wait in the queue.", unit="ms", per=1000, within=(1, 3_600_000))
    timeout: float = tool_option(4.0, "--request-timeout-ms", "MS", _BATCHING,
        "Longest total time for a request.", unit="ms", per=1000, within=(1, 3_600_000))
    target_utilisation: float = tool_option(1.0, "--target-utilisation", "X", _BATCHING,
        "Share of the measured capacity above which the lowest of several tiers only gets what the others leave.", within=(0.1, 1))
    max_queue: int = 20_000  # Maximum number of waiting entries.
    promise: float | None = tool_option(None, "--promise", "MS", _RESULT,
        "Promised latency; answers within it are counted.", unit="ms", per=1000, within=(0.001, 3_600_000))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Gateways in front of the queue, and its shards."""

    gateways: int = tool_option(1, "--gateways", "N", _FLEET,
        "Number of gateways.", type=int, within=(1, 1_000))
    gather: float = tool_option(0.0, "--gather-ms", "MS", _FLEET,
        "Time for which a gateway gathers entries before it calls the queue.", unit="ms", per=1000, within=(0, 1_000))
    shards: int = tool_option(1, "--shards", "N", _FLEET,
        "Maximum number of shards of the queue; each shard in use has at least a few GPUs.", type=int, within=(1, 256))
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulated service and its load. Raises SettingError if a field has an impossible value.

    The help texts of the options describe the fields. All weights are equally likely; for a model that pads, they are lengths.
    Batch times have a log-normal distribution, and times between deaths an exponential one. Half of the overhead comes before a
    run, and half after it. Latencies include the overhead and a gateway's time for gathering entries. Each request goes to a
    random gateway, and is followed until it ends. Arrivals depend on the seed, but not on the policy."""

    # fmt: off
    workers: int = tool_option(MISSING, "--workers", "K", _MODEL,
        "GPUs; not with --autoscale.", type=int, within=(1, 10_000))
    max_batch: int = tool_option(MISSING, "--max-batch-size", "N", _MODEL,
        "Largest batch.", type=int, within=(1, MAX_BATCH))
    rate: float = tool_option(0.0, "--rate", "R", _LOAD,
        "Mean requests per second.", unit="requests/s", within=(0.001, _MAX_RATE))
    clients: int = tool_option(0, "--clients", "N", _LOAD,
        "In place of --rate: number of clients, each of which sends its next request when it gets the answer to the previous one.",
        type=int, within=(1, 100_000))
    alpha: float = tool_option(0.0, "--batch-ms", "MS", _MODEL,
        "Fixed part of a batch's time (α).", unit="ms", per=1000, within=(0.001, 3_600_000))
    beta: float = tool_option(0.0, "--beta-ms", "MS", _MODEL,
        "Time that each input, or each unit of its weight, adds to a batch (β).", unit="ms", per=1000, within=(0, 3_600_000))
    times: BatchTimes | None = tool_option(None, "--batch-times", "FILE", _MODEL,  # noqa: RUF009 - it makes a field
        "In place of --batch-ms: run times recorded by `headway check --record`. Inputs have the weights in FILE, unless --weights is given.",
        type=str, repr=False)
    weights: tuple[int, ...] = tool_option((), "--weights", "LOW-HIGH|FILE", _LOAD,
        "Weights of inputs: uniform between two whole numbers, or one per line of FILE. A batch's time then depends on its weight. For a "
        "model that takes arrays, the weight of an input is its number of rows, and --max-batch-weight is the same as --max-batch-size.",
        type=str, repr=False)
    padded: bool = tool_option(False, "--padded", "", _MODEL,
        "The model pads all inputs of a call to the longest: a call takes --batch-ms + number × longest of --lengths × --beta-ms.",
        type=bool)  # Workers have to discover that the model pads.
    first_come: bool = tool_option(False, "--first-come", "", _BATCHING,
        "With --padded, for comparison: run inputs in the order of arrival, all in one call.", type=bool)
    max_weight: int = tool_option(0, "--max-batch-weight", "N", _MODEL,
        "Maximum weight of a batch; 0: no limit.", type=int, within=(0, MOST_WEIGHT))
    jitter: float = tool_option(0.0, "--jitter", "X", _MODEL,
        "Variation of batch times: their standard deviation as a share of the mean.", within=(0, 10))
    overhead: float = tool_option(0.0015, "--overhead-ms", "MS", _MODEL,
        "Time between a GPU's answer and its next batch.", unit="ms", per=1000, within=(0, 60_000))
    policy: str = tool_option("paced", "--policy", "|".join(POLICIES), _BATCHING, "When a batch starts.", type=str)
    trace: tuple[float, ...] = tool_option((), "--trace", "FILE", _LOAD,
        "Arrivals as recorded in FILE (CSV with a TIMESTAMP column or a single column of seconds), scaled to the rate. By default "
        "Poisson.",
        type=str, repr=False)  # Replayed at the mean rate; empty for Poisson arrivals.
    steps: tuple[Step, ...] = tool_option((), "--step", "S=R", _LOAD,
        "From second S on, R requests per second. Repeatable.", type=str, multiple=True)
    duration: float = tool_option(60.0, "--duration", "S", _LOAD, "Seconds of load.", unit="s", within=(0.001, 604_800))
    warmup: float = tool_option(5.0, "--warmup", "S", _LOAD,
        "Seconds at the start to exclude from the results. By default 75 batch times, but at most half of the duration.")
    mix: Mapping[str, float] = tool_option(MISSING, "--mix", "TIER=WEIGHT,…", _LOAD,
        "Tiers and their weights, highest first, or `usual` for enterprise=5,paid=25,free=70.",
        type=str, default_factory=lambda: {EVERYBODY: 1.0})
    tenants: int = tool_option(1, "--tenants", "N", _LOAD, "Number of tenants in each tier, with equal load.", type=int, within=(1, 100_000))
    bulk: bool = tool_option(False, "--bulk", "", _LOAD, "Bulk job lines are always waiting for empty seats.", type=bool)
    seed: int = tool_option(0, "--seed", "N", _LOAD, "Runs with the same seed are identical.", type=int)
    faults: Faults = Faults()
    queue: QueueRules = QueueRules()
    topology: Topology = Topology()
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self, tool_options_of(self).keys() - {"alpha", "beta", "clients", "rate"})
        for group in (self.faults, self.queue, self.topology):
            check_options(group, tool_options_of(group))
        if self.padded and not self.weights:
            raise SettingError("--padded", True, "needs the lengths of inputs", LENGTHS_HINT)
        if self.max_weight and not self.weights:
            raise SettingError("--max-batch-weight", self.max_weight, "needs input weights", WEIGHTS_HINT)
        if not 0 <= self.warmup < self.duration:
            reason = f"must lie between 0 and the duration of {self.duration:g} s"
            raise SettingError("--warmup", self.warmup, reason, "Shorten it, or increase --duration.")
        if self.policy not in POLICIES:
            near = nearest(self.policy, POLICIES)
            raise SettingError("--policy", self.policy, "is unknown", f"Use {' or '.join(near or POLICIES)}.")
        if not self.mix or not sum(self.mix.values()) > 0:
            raise SettingError("--mix", dict(self.mix), "no tier has a weight above 0", "For example paid=25,free=70.")
        self._check_load()
        self._check_batch_time()

    def _check_batch_time(self) -> None:
        times = self.times
        if times is None:
            check_options(self, ("alpha", "beta"))
            return
        for setting, value in (
            ("--batch-ms", self.alpha * 1000),
            ("--beta-ms", self.beta * 1000),
            ("--jitter", self.jitter),
        ):
            if value:
                raise SettingError(setting, value, "cannot be combined with --batch-times", "Leave out one of them.")
        if self.max_batch > times.largest:
            reason = f"no recorded batch has more than {times.largest} inputs"
            raise SettingError("--max-batch-size", self.max_batch, reason, "Record larger batches, or reduce it.")
        if not self.weights:
            raise SettingError("--batch-times", f"{len(times)} batches", "needs input weights", WEIGHTS_HINT)
        if max(self.weights) > times.heaviest:
            reason = f"no recorded input is heavier than {times.heaviest}"
            raise SettingError("--weights", max(self.weights), reason, "Record longer inputs, or reduce it.")

    def _check_load(self) -> None:
        if self.clients:
            check_options(self, ("clients",))
            for setting, value in (("--rate", self.rate), ("--trace", len(self.trace)), ("--step", len(self.steps))):
                if value:
                    raise SettingError(setting, value, "cannot be combined with --clients", "Leave out one of them.")
        else:
            check_options(self, ("rate",))
        for step in self.steps:
            check_within("--step", step.rate, 0.001, _MAX_RATE, "requests/s")
        if [step.at for step in self.steps] != sorted({step.at for step in self.steps}):
            raise SettingError(
                "--step", [step.at for step in self.steps], "is not in order of time", "Sort the steps by time."
            )
        if self.steps and self.trace:
            raise SettingError("--step", len(self.steps), "cannot be combined with --trace", "Leave out one of them.")
        for kill in self.faults.kills:
            check_within("--kill", kill.at, 0, self.duration, "s")
            check_within("--kill", kill.workers, 1, self.workers, "workers")

    @property
    def capacity(self) -> float:
        """Most requests per second that the GPUs can answer, if all batches are full."""
        return self.workers * self.full / self.cycle(self.max_batch)

    @property
    def mean_weight(self) -> float:
        """Mean weight of an entry; 1 if entries aren't weighed."""
        return sum(self.weights) / len(self.weights) if self.weights else 1.0

    @property
    def full(self) -> float:
        return self._weight(self.max_batch) / self.mean_weight

    def cycle(self, size: int) -> float:
        """Return the seconds from when a batch starts until its GPU is free again."""
        if self.times is not None:
            near = NEAR_BATCHES if self.pads and size > 1 else 1
            return self.times.mean(size, self.weights, self.max_weight, near) + self.overhead
        if self.padded:
            return self.alpha + self.beta * size * self._padded_length(size) + self.overhead
        return self.alpha + self.beta * self._weight(size) + self.overhead

    def _padded_length(self, size: int) -> float:
        """Return the mean length to which inputs of full batches are padded, as estimated for a long queue."""
        ascending = sorted(self.weights)
        longest = _mean_longest(ascending, size)
        if self.first_come:
            return longest
        parts = NEAR_BATCHES
        ends = [ascending[max(len(ascending) * part // parts - 1, 0)] for part in range(1, parts)]
        return min(longest, (sum(ends) + _mean_longest(ascending, parts * size)) / parts)

    def _weight(self, count: int) -> float:
        """Return the mean weight of `count` entries, limited to the maximum weight of a batch."""
        weight = count * self.mean_weight
        return min(weight, max(self.max_weight, self.mean_weight)) if self.max_weight else weight

    def limits(self) -> QueueLimits:
        return QueueLimits(
            tiers=len(self.mix), max_batch=self.max_batch, max_queue=self.queue.max_queue, max_weight=self.max_weight,
            promise=self.queue.promise or 0.0,
        )  # fmt: skip

    @property
    def pads(self) -> bool:
        """True if workers discover that the model pads, and batches are made accordingly."""
        return (self.padded or (self.times is not None and self.times.padded)) and not self.first_come

    def make_policy(self) -> Policy:
        return Eager() if self.policy == "eager" else policies.build(self.policy, self.queue.max_wait)


def _mean_longest(ascending: Sequence[int], count: int) -> float:
    """Return the mean of the longest of `count` lengths drawn at random from `ascending`."""
    total, below, mean = len(ascending), 0.0, 0.0
    for place, length in enumerate(ascending, 1):
        reached = (place / total) ** count
        mean += length * (reached - below)
        below = reached
    return mean


def parse_steps(texts: Iterable[str]) -> tuple[Step, ...]:
    """Parse rate changes such as `10=1000`: 1,000 requests per second from 10 s on. Raises SettingError."""
    return tuple(Step(at, rate) for at, rate in _pairs("--step", texts, "10=1000"))


def parse_kills(texts: Iterable[str]) -> tuple[Kill, ...]:
    """Parse deaths such as `10=4`: 4 workers die at 10 s. Raises SettingError."""
    return tuple(Kill(at, int(workers)) for at, workers in _pairs("--kill", texts, "10=4"))


def _pairs(setting: str, texts: Iterable[str], example: str) -> Iterator[tuple[float, float]]:
    for text in texts:
        at, _, number = text.partition("=")
        try:
            pair = float(at), float(number)
        except ValueError:
            pair = math.nan, math.nan
        if not all(map(math.isfinite, pair)):
            raise SettingError(setting, text, "is not SECONDS=NUMBER", f"For example {example}.")
        yield pair
