"""Scenario to simulate: one frozen object, checked when it is built. All times are in seconds."""

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

POLICIES = (*policies.NAMES, "eager")  # The production policies, and one for contrast.
EVERYBODY = "all"  # Name of the only tier when there is no mix.
LENGTHS_HINT = "Give --lengths, such as 5-250, or a file with one length a line or from headway check --record."
WEIGHTS_HINT = "Give --weights, such as 5-250, or a file with one weight a line."
USUAL_MIX: Mapping[str, float] = {"enterprise": 5.0, "paid": 25.0, "free": 70.0}

_LOAD, _MODEL, _BATCHING, _FLEET = "Load", "Model and GPUs", "Batching", "Gateways and shards"
_FAILURES, _RESULT = "Failures", "Results"
_MAX_RATE = 1_000_000.0


class Eager:
    """Policy that never holds a batch back. It is only for contrast with the production policies."""

    def rule(self, load: Load) -> Rule:
        return Rule(size=load.max_batch, headway=0.0)


class Step(msgspec.Struct, frozen=True):
    """Change of the rate. From `at` on, requests come at `rate` per second."""

    at: float
    rate: float


class Kill(msgspec.Struct, frozen=True):
    """Death of `workers` workers at `at`. With `silent`, their hosts die too. Nobody notices before heartbeats are missed, and what
    ran goes to others when its leases end."""

    at: float
    workers: int
    silent: bool = False


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulated service under a load. Raises SettingError if a part of it is impossible.

    Fields with an option are described by its help. Weights are all equally likely, and lengths for a model that pads. Times of
    batches are log-normal, and times between deaths exponential. The overhead lies half before a run and half after. It is part of
    every latency, as is the time to gather, which counts from the gateway's last call to the queue. Each request goes to a gateway
    by chance. Requests that come within the duration are followed to their end. Arrivals depend on the seed, not on policies."""

    # fmt: off
    workers: int = tool_option(MISSING, "--workers", "K", _MODEL,
        "GPUs; not with --autoscale.", type=int, within=(1, 10_000))
    max_batch: int = tool_option(MISSING, "--max-batch-size", "N", _MODEL,
        "Largest batch.", type=int, within=(1, MAX_BATCH))
    rate: float = tool_option(0.0, "--rate", "R", _LOAD,
        "Mean requests per second.", unit="requests/s", within=(0.001, _MAX_RATE))
    clients: int = tool_option(0, "--clients", "N", _LOAD,
        "In place of --rate: number of clients, each of which sends its next request when it has the answer to the last one.",
        type=int, within=(1, 100_000))
    alpha: float = tool_option(0.0, "--batch-ms", "MS", _MODEL,
        "Fixed part of a batch's time (α).", unit="ms", per=1000, within=(0.001, 3_600_000))
    beta: float = tool_option(0.0, "--beta-ms", "MS", _MODEL,
        "Time that each input, or each unit of its weight, adds to a batch (β).", unit="ms", per=1000, within=(0, 3_600_000))
    times: BatchTimes | None = tool_option(None, "--batch-times", "FILE", _MODEL,  # noqa: RUF009 - it makes a field
        "In place of --batch-ms: run times recorded by `headway check --record`. Inputs weigh what those in FILE do, unless --weights is given.",
        type=str, repr=False)
    weights: tuple[int, ...] = tool_option((), "--weights", "LOW-HIGH|FILE", _LOAD,
        "Weights of inputs: evenly between two whole numbers, or one per line of FILE. A batch's time then depends on its weight. For a "
        "model that takes arrays, an input weighs as much as it has rows, and --max-batch-weight is the same number as --max-batch-size.",
        type=str, repr=False)
    padded: bool = tool_option(False, "--padded", "", _MODEL,
        "The model pads all inputs of a call to the longest: a call takes --batch-ms + number × longest of --lengths × --beta-ms.",
        type=bool)  # Workers have to find out that the model pads.
    first_come: bool = tool_option(False, "--first-come", "", _BATCHING,
        "With --padded, for comparison: run inputs in the order of arrival, all in one call.", type=bool)
    max_weight: int = tool_option(0, "--max-batch-weight", "N", _MODEL,
        "Most weight of a batch; 0: no bound.", type=int, within=(0, MOST_WEIGHT))
    jitter: float = tool_option(0.0, "--jitter", "X", _MODEL,
        "How much batch times vary: their standard deviation, as a share of the mean.", within=(0, 10))
    slow: float = tool_option(1.0, "--slow", "X", _FAILURES,
        "How many times as long the first of the GPUs takes.", within=(0.01, 100))
    overhead: float = tool_option(0.0015, "--overhead-ms", "MS", _MODEL,
        "Time between a GPU's answer and its next batch.", unit="ms", per=1000, within=(0, 60_000))
    policy: str = tool_option("paced", "--policy", "|".join(POLICIES), _BATCHING, "When a batch leaves.", type=str)
    max_wait: float | None = tool_option(None, "--max-wait-ms", "MS", _BATCHING,
        FIELDS["max_wait_ms"].help, unit="ms", per=1000, within=(0, 60_000))
    trace: tuple[float, ...] = tool_option((), "--trace", "FILE", _LOAD,
        "Arrivals as recorded in FILE (CSV with a TIMESTAMP column or one column of seconds), its time scaled to the rate. By default "
        "Poisson.",
        type=str, repr=False)  # Replayed at the mean rate; empty for Poisson arrivals.
    steps: tuple[Step, ...] = tool_option((), "--step", "S=R", _LOAD,
        "From second S on, R requests per second. Repeatable.", type=str, multiple=True)
    duration: float = tool_option(60.0, "--duration", "S", _LOAD, "Seconds of load.", unit="s", within=(0.001, 604_800))
    warmup: float = tool_option(5.0, "--warmup", "S", _LOAD,
        "Seconds at the start to leave out of the results. By default 75 batch times, at most half of the duration.")
    mix: Mapping[str, float] = tool_option(MISSING, "--mix", "TIER=WEIGHT,…", _LOAD,
        "Tiers and their weights, highest first, or `usual` for enterprise=5,paid=25,free=70.",
        type=str, default_factory=lambda: {EVERYBODY: 1.0})
    tenants: int = tool_option(1, "--tenants", "N", _LOAD, "Equal tenants in each tier.", type=int, within=(1, 100_000))
    queue_timeout: float = tool_option(2.0, "--queue-timeout-ms", "MS", _BATCHING,
        "Longest wait in the queue.", unit="ms", per=1000, within=(1, 3_600_000))
    timeout: float = tool_option(4.0, "--request-timeout-ms", "MS", _BATCHING,
        "Longest time for a request in all.", unit="ms", per=1000, within=(1, 3_600_000))
    reserved_share: float = 0.1  # Share of each batch kept for lower tiers, 0 to 0.5.
    target_utilisation: float = tool_option(1.0, "--target-utilisation", "X", _BATCHING,
        "Share of the measured capacity above which the lowest of several tiers is held to what the others leave.", within=(0.1, 1))
    max_queue: int = 20_000  # Most waiting entries.
    promise: float | None = tool_option(None, "--promise", "MS", _RESULT,
        "Promised latency; answers within it are counted.", unit="ms", per=1000, within=(0.001, 3_600_000))
    fail_every: float = tool_option(0.0, "--fail-every", "S", _FAILURES,
        "Mean seconds between two deaths of one worker; 0: never.", unit="s", within=(0, 31_536_000))
    kills: tuple[Kill, ...] = tool_option((), "--kill", "S=N", _FAILURES,
        "At second S, N workers die. Repeatable.", type=str, multiple=True)
    restart: float = tool_option(5.0, "--restart-s", "S", _FAILURES,
        "Seconds until a dead worker serves again.", unit="s", within=(0, 86_400))
    poison: float = tool_option(0.0, "--poison", "X", _FAILURES,
        "Share of inputs that make any batch they are in fail.", within=(0, 1))
    poisoner: bool = False  # True if all poison comes from one tenant that sends nothing else.
    gateways: int = tool_option(1, "--gateways", "N", _FLEET,
        "Gateways that requests come through.", type=int, within=(1, 1_000))
    gather: float = tool_option(0.0, "--gather-ms", "MS", _FLEET,
        "Time for which a gateway gathers entries before it calls the queue.", unit="ms", per=1000, within=(0, 1_000))
    shards: int = tool_option(1, "--shards", "N", _FLEET,
        "Shards that the queue may be cut into; each in use has a few GPUs at least.", type=int, within=(1, 256))
    bulk: bool = tool_option(False, "--bulk", "", _LOAD, "Lines of bulk jobs always wait for empty seats.", type=bool)
    seed: int = tool_option(0, "--seed", "N", _LOAD, "Same seed, same run.", type=int)
    # fmt: on

    def __post_init__(self) -> None:
        check_options(self, tool_options_of(self).keys() - {"alpha", "beta", "clients", "rate"})
        if self.padded and not self.weights:
            raise SettingError("--padded", True, "needs to know how long inputs are", LENGTHS_HINT)
        if self.max_weight and not self.weights:
            raise SettingError("--max-batch-weight", self.max_weight, "needs to know what entries weigh", WEIGHTS_HINT)
        if not 0 <= self.warmup < self.duration:
            reason = f"must lie between 0 and the duration of {self.duration:g} s"
            raise SettingError("--warmup", self.warmup, reason, "Shorten it, or make --duration longer.")
        if self.policy not in POLICIES:
            near = nearest(self.policy, POLICIES)
            raise SettingError("--policy", self.policy, "is not known", f"Use {' or '.join(near or POLICIES)}.")
        if not self.mix or not sum(self.mix.values()) > 0:
            raise SettingError("--mix", dict(self.mix), "no tier has weight", "For example paid=25,free=70.")
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
                raise SettingError(setting, value, "cannot go with --batch-times", "Leave one of them out.")
        if self.max_batch > times.largest:
            reason = f"no recorded batch has more than {times.largest} inputs"
            raise SettingError("--max-batch-size", self.max_batch, reason, "Record larger ones, or ask for less.")
        if not self.weights:
            raise SettingError("--batch-times", f"{len(times)} batches", "need the weights of entries", WEIGHTS_HINT)
        if max(self.weights) > times.heaviest:
            reason = f"no recorded input is heavier than {times.heaviest}"
            raise SettingError("--weights", max(self.weights), reason, "Record longer ones, or ask for less.")

    def _check_load(self) -> None:
        if self.clients:
            check_options(self, ("clients",))
            for setting, value in (("--rate", self.rate), ("--trace", len(self.trace)), ("--step", len(self.steps))):
                if value:
                    raise SettingError(setting, value, "cannot go with --clients", "Leave one of them out.")
        else:
            check_options(self, ("rate",))
        for step in self.steps:
            check_within("--step", step.rate, 0.001, _MAX_RATE, "requests/s")
        if [step.at for step in self.steps] != sorted({step.at for step in self.steps}):
            raise SettingError("--step", [step.at for step in self.steps], "is out of order", "Sort them by time.")
        if self.steps and self.trace:
            raise SettingError("--step", len(self.steps), "cannot go with --trace", "Leave one of them out.")
        for kill in self.kills:
            check_within("--kill", kill.at, 0, self.duration, "s")
            check_within("--kill", kill.workers, 1, self.workers, "workers")

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(self.mix)

    @property
    def capacity(self) -> float:
        """Most requests per second that the GPUs can answer, in full batches."""
        return self.workers * self.full / self.cycle(self.max_batch)

    @property
    def mean_weight(self) -> float:
        """Mean weight of an entry; 1 if all weigh the same."""
        return sum(self.weights) / len(self.weights) if self.weights else 1.0

    @property
    def full(self) -> float:
        return self._weight(self.max_batch) / self.mean_weight

    def cycle(self, size: int) -> float:
        """Return the seconds from the departure of a batch until its GPU is free again."""
        if self.times is not None:
            near = NEAR_BATCHES if self.pads and size > 1 else 1
            return self.times.mean(size, self.weights, self.max_weight, near) + self.overhead
        if self.padded:
            return self.alpha + self.beta * size * self._padded_length(size) + self.overhead
        return self.alpha + self.beta * self._weight(size) + self.overhead

    def _padded_length(self, size: int) -> float:
        """Return the mean length that inputs of full batches are padded to, as estimated for a long queue."""
        ascending = sorted(self.weights)
        longest = _mean_longest(ascending, size)
        if self.first_come:
            return longest
        parts = NEAR_BATCHES
        ends = [ascending[max(len(ascending) * part // parts - 1, 0)] for part in range(1, parts)]
        return min(longest, (sum(ends) + _mean_longest(ascending, parts * size)) / parts)

    def _weight(self, count: int) -> float:
        """Return the mean weight of `count` entries, as far as a batch may hold it."""
        weight = count * self.mean_weight
        return min(weight, max(self.max_weight, self.mean_weight)) if self.max_weight else weight

    def limits(self) -> QueueLimits:
        return QueueLimits(
            tiers=len(self.mix), max_batch=self.max_batch, reserved_share=self.reserved_share, max_queue=self.max_queue,
            max_weight=self.max_weight, promise=self.promise or 0.0,
        )  # fmt: skip

    @property
    def pads(self) -> bool:
        """True if workers find out that the model pads, and batches are made by that."""
        return (self.padded or (self.times is not None and self.times.padded)) and not self.first_come

    def make_policy(self) -> Policy:
        return Eager() if self.policy == "eager" else policies.build(self.policy, self.max_wait)


def _mean_longest(ascending: Sequence[int], count: int) -> float:
    """Return the mean of the longest of `count` lengths drawn from these."""
    total, below, mean = len(ascending), 0.0, 0.0
    for place, length in enumerate(ascending, 1):
        reached = (place / total) ** count
        mean += length * (reached - below)
        below = reached
    return mean


def parse_steps(texts: Iterable[str]) -> tuple[Step, ...]:
    """Parse changes of the rate, such as `10=1000`: from 10 s on, 1,000 requests per second. Raises SettingError."""
    return tuple(Step(at, rate) for at, rate in _pairs("--step", texts, "10=1000"))


def parse_kills(texts: Iterable[str]) -> tuple[Kill, ...]:
    """Parse deaths, such as `10=4`: after 10 s, 4 workers die. Raises SettingError."""
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
