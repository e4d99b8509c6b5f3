"""Finds the number of GPUs that a load needs: the smallest number whose simulated percentiles meet the targets.

The search starts with the number from the formula of `core.scaling.sizing`, which the autoscaler also uses. It goes up or down in
growing steps, and then bisects. The result is confirmed with several seeds. Unanswered requests count as infinitely late."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec

from headway.config.fields import check_within
from headway.config.settings import MAX_REQUEST_TIMEOUT_MS
from headway.core.scaling.sizing import BatchCost, fewest_slots
from headway.errors import SettingError
from headway.simulator.engine import simulate
from headway.simulator.report import Report, make_report, percentile
from headway.simulator.scenario import Scenario

SEEDS = 5
BULK_SEEDS = 2  # Runs for predicting the bulk lines. They differ little.
SETTLING = 75.0  # Warm-up in batch times. Near saturation, GPUs start in step, and take this long to spread out.
FOUND_OUT = 3.0  # For a model that pads, the warm-up is longer by this factor: entries pile up until workers notice.
MEASURED = 50.0  # Minimum number of batch times to measure.
MEASURED_REQUESTS = 10_000  # Minimum number of requests to measure in each run for a prediction.
RATE_STEPS = 5  # Bisections in the search for the highest rate, which is then known to 1/32 of the spare capacity.
RATE_SEEDS = 2  # Runs that must meet the targets at each of these rates.
RATE_REQUESTS = 5_000  # Fewest requests in each of these runs, which take most of a plan's time.
EDGE_SHARE, EDGE_MS = 0.03, 2.0  # A real run may miss a target if it is within this share of it, or this many ms.
# Student's t for a two-sided 95 % interval, by number of values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the planner. The planner itself chooses the scenario's number of workers, times and seed."""

    scenario: Scenario
    p95: float | None = None  # Maximum 95th percentile of latency in seconds; None for no limit.
    p99: float | None = None
    gpu_hour_cost: float | None = None  # In any currency.
    max_gpus: int = 2_000
    target_utilisation: float = 0.7  # Share of the capacity, 0.1 to 1, that a fleet with room to spare uses.
    bulk: bool = False  # True to find how many bulk lines fit in next to the load.

    def __post_init__(self) -> None:
        if self.p95 is None and self.p99 is None:
            raise SettingError("--p95", None, "no target is given", "Give --p95 or --p99, in ms.")
        least = self.scenario.cycle(1)
        for setting, target in (("--p95", self.p95), ("--p99", self.p99)):
            if target is not None and not (math.isfinite(target) and target > 0.0):
                raise SettingError(setting, f"{target * 1000:g} ms", "must be a time above 0", "For example 200.")
            if target is not None and target > MAX_REQUEST_TIMEOUT_MS / 1000:
                reason = f"is above the maximum deadline of {MAX_REQUEST_TIMEOUT_MS / 1000:g} s"
                raise SettingError(setting, f"{target * 1000:g} ms", reason, "Choose a smaller value.")
            if target is not None and target < least:
                reason = f"no request is answered sooner than one batch takes, {least * 1000:g} ms with its overhead"
                hint = "Choose a larger value, or make batches faster; more GPUs do not help."
                raise SettingError(setting, f"{target * 1000:g} ms", reason, hint)
        check_within("--max-gpus", self.max_gpus, 1, 10_000)
        check_within("--target-utilisation", self.target_utilisation, 0.1, 1)
        cost = self.gpu_hour_cost
        if cost is not None and not (math.isfinite(cost) and cost >= 0):
            raise SettingError("--gpu-hour-cost", cost, "must be a price of 0 or more", "For example 2.5.")

    def met_by(self, prediction: Prediction) -> bool:
        """Return True if a prediction meets the targets even at the worst end of its confidence intervals."""
        return all(worst <= target for target, worst in self._targets_and_worst(prediction))

    def on_the_edge(self, prediction: Prediction) -> bool:
        """Return True if a prediction is so close to a target that a real run may miss it."""
        return any(
            worst > target - max(EDGE_SHARE * target, EDGE_MS) for target, worst in self._targets_and_worst(prediction)
        )

    def _targets_and_worst(self, prediction: Prediction) -> list[tuple[float, float]]:
        """Return each target that is set, with the worst end of its confidence interval, in milliseconds."""
        doubt = prediction.doubt_ms
        pairs = ((self.p95, prediction.p95_ms + doubt.p95), (self.p99, prediction.p99_ms + doubt.p99))
        return [(target * 1000, worst) for target, worst in pairs if target is not None]


class ConfidenceInterval(msgspec.Struct, frozen=True):
    """Half-widths in ms of the 95 % confidence intervals of percentiles, from their spread over the seeds."""

    p50: float
    p95: float
    p99: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Expected results for a number of GPUs and requests per second. Unanswered requests count as infinitely late."""

    gpus: int
    rate: float
    p50_ms: float  # Over all requests; null in JSON if infinite.
    p95_ms: float
    p99_ms: float
    doubt_ms: ConfidenceInterval  # Half-widths of the confidence intervals.
    unanswered: float  # Share of unanswered requests.
    fill: float  # Mean batch size as a share of the largest batch.
    utilisation: float  # Share of time for which the GPUs run batches.


class Cost(msgspec.Struct, frozen=True):
    """Cost of a plan, in the currency of `gpu_hour_cost`."""

    per_hour: float
    per_million_requests: float


class Plan(Prediction, frozen=True, kw_only=True):
    """Prediction for the smallest sufficient number of GPUs, with additional results."""

    capacity: float  # Most requests per second that these GPUs can answer, if all batches are full.
    load: float  # `rate` divided by `capacity`.
    arrivals_cv: float  # Coefficient of variation of the gaps between arrivals: 1 for Poisson, higher if burstier.
    meets_up_to: float  # Highest rate, in requests per second, at which these GPUs still meet the targets.
    one_less: Prediction | None  # Prediction for one GPU fewer; null if that can't handle the load at all.
    on_the_edge: bool  # True if the prediction is so close to a target that a real run may miss it.
    one_more: Prediction | None  # Prediction for one more GPU if `on_the_edge`, else null.
    with_room: int  # Smallest number of GPUs at which the load is within the target utilisation.
    cost: Cost | None  # Cost of the GPUs; null if no price is given.
    first_come: int | None  # For a model that pads, `gpus` with `Scenario.first_come`; null if above the limit.
    bulk: float | None  # Bulk lines per second that fit into empty seats; null if `Goal.bulk` is False.
    seeds: int  # Number of simulations.
    requests: int  # Number of requests measured in them.


def make_plan(goal: Goal, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Find the smallest sufficient number of GPUs. Tells `progress` each step. Raises SettingError if no allowed number suffices."""
    return _Planner(goal, progress).plan()


class _Planner:
    def __init__(self, goal: Goal, progress: Callable[[str], None]) -> None:
        self._goal = goal
        self._progress = progress
        self._runs: dict[tuple[int, float, int], _Run] = {}  # Runs by GPUs, rate and seed.

    def plan(self) -> Plan:
        goal, rate, price = self._goal, self._goal.scenario.rate, self._goal.gpu_hour_cost
        bound, gpus = self._least(), self.fewest()
        prediction = self._prediction(gpus, rate, SEEDS)
        runs = self._several(gpus, rate, SEEDS)
        capacity = self._with(gpus, rate, 0).capacity
        edge = goal.on_the_edge(prediction)
        return Plan(
            **msgspec.structs.asdict(prediction),
            capacity=capacity,
            load=rate / capacity,
            arrivals_cv=runs[-1].report.arrivals_cv,
            meets_up_to=self._highest_rate(prediction, capacity),
            one_less=self._prediction(gpus - 1, rate, SEEDS) if gpus > bound else None,
            on_the_edge=edge,
            one_more=self._prediction(gpus + 1, rate, SEEDS) if edge and gpus < goal.max_gpus else None,
            with_room=max(gpus, math.ceil(rate * gpus / (capacity * goal.target_utilisation) - 1e-9)),
            cost=None if price is None else Cost(gpus * price, gpus * price / (rate * 3600) * 1e6),
            first_come=self._first_come(),
            bulk=self._bulk(gpus, rate) if goal.bulk else None,
            seeds=SEEDS,
            requests=sum(run.report.total.requests for run in runs),
        )

    def fewest(self) -> int:
        """Return the smallest number of GPUs that meets the targets with all seeds."""
        gpus, rate = self._search(self._least()), self._goal.scenario.rate
        while not self._meets(gpus, rate, SEEDS):
            if gpus >= self._goal.max_gpus:
                self._give_up(gpus, rate, SEEDS)
            gpus += 1
        return gpus

    def _first_come(self) -> int | None:
        if not self._goal.scenario.pads:
            return None
        as_they_come = replace(self._goal.scenario, first_come=True)
        try:
            return _Planner(msgspec.structs.replace(self._goal, scenario=as_they_come), self._progress).fewest()
        except SettingError:
            return None

    def _bulk(self, gpus: int, rate: float) -> float:
        """Return how many bulk lines per second can run beside the load. The promise is the target for P95, or else P99."""
        promise = self._goal.p95 or self._goal.p99
        self._progress(f"{gpus} GPU{'s' if gpus > 1 else ''} at {rate:,.0f} requests/s with bulk jobs")
        rates = []
        for seed in range(BULK_SEEDS):
            scenario = self._with(gpus, rate, seed)
            scenario = replace(scenario, bulk=True, queue=replace(scenario.queue, promise=promise))
            rates.append(simulate(scenario).bulk / (scenario.duration - scenario.warmup))
        return statistics.fmean(rates)

    def _least(self) -> int:
        """Return the smallest number of GPUs that can handle the load at all."""
        goal, scenario = self._goal, self._goal.scenario
        if scenario.pads:  # How much splitting batches into calls saves is only known after a run.
            return 1
        busy = scenario.rate * scenario.cycle(scenario.max_batch) / scenario.full
        least = max(1, math.floor(busy) + 1)
        if least > goal.max_gpus:
            reason = f"{scenario.rate:g} requests/s keep {busy:.1f} GPUs busy even if all batches are full"
            raise SettingError("--max-gpus", goal.max_gpus, reason, f"Allow {least} or more.")
        return least

    def _search(self, bound: int) -> int:
        """Return the smallest number of GPUs that meets the targets with one seed."""
        rate, most = self._goal.scenario.rate, self._goal.max_gpus
        below, gpus, step = bound - 1, max(bound, min(self._estimate(), most)), 1
        while gpus - below > 1 and self._meets(gpus, rate, 1):
            lower = max(gpus - step, below + 1)
            if not self._meets(lower, rate, 1):
                below = lower
                break
            gpus, step = lower, step * 2
        step = 1
        while not self._meets(gpus, rate, 1):
            if gpus >= most:
                self._give_up(gpus, rate, 1)
            below, gpus, step = gpus, min(gpus + step, most), step * 2
        while gpus - below > 1:
            middle = (below + gpus) // 2
            if self._meets(middle, rate, 1):
                gpus = middle
            else:
                below = middle
        return gpus

    def _estimate(self) -> int:
        """Return the number of GPUs from the formula, or 0 if it doesn't apply. For a model that pads, only capacity counts."""
        scenario, target = self._goal.scenario, self._goal.p95
        if scenario.pads:
            return math.floor(scenario.rate / scenario.capacity) + 1
        if target is None or scenario.times is not None or scenario.weights:
            return 0
        alpha, beta, most = scenario.alpha + scenario.overhead, scenario.beta, scenario.max_batch
        deviation = scenario.jitter * (scenario.alpha + beta * most / 2)
        return fewest_slots(BatchCost(alpha, beta, most, deviation), scenario.rate, target) or 0

    def _give_up(self, gpus: int, rate: float, seeds: int) -> NoReturn:
        goal, prediction = self._goal, self._prediction(gpus, rate, seeds)
        setting, target = ("--p95", goal.p95) if goal.p95 is not None else ("--p99", goal.p99)
        shown = f"{(target or 0.0) * 1000:g} ms"
        reason = (
            f"{gpus} GPUs give p95 {prediction.p95_ms:.1f} and p99 {prediction.p99_ms:.1f} ms, and no more are allowed"
        )
        hint = "Choose a larger value, try another policy, or allow more GPUs with --max-gpus."
        raise SettingError(setting, shown, reason, hint)

    def _highest_rate(self, prediction: Prediction, capacity: float) -> float:
        low, high = prediction.rate, max(prediction.rate, capacity)
        for _ in range(RATE_STEPS):
            middle = (low + high) / 2
            if all(self._meets_in_a_run(prediction, middle, seed) for seed in range(RATE_SEEDS)):
                low = middle
            else:
                high = middle
        return low

    def _meets_in_a_run(self, prediction: Prediction, rate: float, seed: int) -> bool:
        """Return True if a short run at `rate` meets the targets, even with the confidence intervals of `prediction`."""
        self._tell(prediction.gpus, rate)
        run = self._run(self._with(prediction.gpus, rate, seed, RATE_REQUESTS))
        return self._goal.met_by(_prediction(prediction.gpus, rate, [run], prediction.doubt_ms))

    def _meets(self, gpus: int, rate: float, seeds: int) -> bool:
        return self._goal.met_by(self._prediction(gpus, rate, seeds))

    def _prediction(self, gpus: int, rate: float, seeds: int) -> Prediction:
        return _prediction(gpus, rate, self._several(gpus, rate, seeds))

    def _several(self, gpus: int, rate: float, seeds: int) -> list[_Run]:
        """Return the runs with the first `seeds` seeds. Each is simulated only once."""
        for seed in range(seeds):
            if (gpus, rate, seed) not in self._runs:
                self._tell(gpus, rate)
                self._runs[gpus, rate, seed] = self._run(self._with(gpus, rate, seed))
        return [self._runs[gpus, rate, seed] for seed in range(seeds)]

    def _tell(self, gpus: int, rate: float) -> None:
        self._progress(f"{gpus} GPU{'s' if gpus > 1 else ''} at {rate:,.0f} requests/s")

    def _with(self, gpus: int, rate: float, seed: int, requests: int | None = None) -> Scenario:
        """Return the scenario for a run. A trace is played once to settle and once to measure; each seed starts elsewhere in it."""
        given = self._goal.scenario
        cycle = given.cycle(given.max_batch)
        least_timeout = 2 * max(self._goal.p95 or 0.0, self._goal.p99 or 0.0)
        settling = SETTLING * (FOUND_OUT if given.pads else 1.0)
        warmup, measured = settling * cycle, max(MEASURED * cycle, (requests or MEASURED_REQUESTS) / rate)
        if given.trace:
            warmup = measured = len(given.trace) / rate
        timeouts = max(given.queue.queue_timeout, least_timeout), max(given.queue.timeout, least_timeout)
        return replace(
            given, rate=rate, workers=gpus, trace=_turned(given.trace, seed / SEEDS), warmup=warmup, duration=warmup + measured,
            queue=replace(given.queue, queue_timeout=timeouts[0], timeout=timeouts[1]), seed=given.seed + seed,
        )  # fmt: skip

    def _run(self, scenario: Scenario) -> _Run:
        record = simulate(scenario)
        report = make_report(record)
        flow = report.total
        missing = flow.requests - flow.answered
        ascending = [*sorted(record.latency), *[math.inf] * missing]
        p50, p95, p99 = (percentile(ascending, share) * 1000 for share in (0.50, 0.95, 0.99))
        return _Run(p50, p95, p99, missing / flow.requests if flow.requests else 0.0, report)


class _Run(msgspec.Struct, frozen=True):
    p50: float
    p95: float
    p99: float
    unanswered: float
    report: Report


def _prediction(gpus: int, rate: float, runs: Sequence[_Run], doubt: ConfidenceInterval | None = None) -> Prediction:
    """Return the means of some runs. `doubt`, if not given, is calculated from their spread."""
    return Prediction(
        gpus=gpus, rate=rate, p50_ms=statistics.fmean(run.p50 for run in runs), p95_ms=statistics.fmean(run.p95 for run in runs),
        p99_ms=statistics.fmean(run.p99 for run in runs), doubt_ms=doubt or _interval(runs),
        unanswered=statistics.fmean(run.unanswered for run in runs), fill=statistics.fmean(run.report.batches.fill for run in runs),
        utilisation=statistics.fmean(run.report.utilisation for run in runs),
    )  # fmt: skip


def _interval(runs: Sequence[_Run]) -> ConfidenceInterval:
    p50s, p95s, p99s = zip(*((run.p50, run.p95, run.p99) for run in runs), strict=True)
    return ConfidenceInterval(_doubt(p50s), _doubt(p95s), _doubt(p99s))


def _doubt(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 0.0
    return STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def _turned(trace: tuple[float, ...], share: float) -> tuple[float, ...]:
    """Return the trace with the first `share` of it moved to the end."""
    cut = int(len(trace) * share)
    if not cut:
        return trace
    lap = (trace[-1] - trace[0]) * len(trace) / (len(trace) - 1)
    return (*trace[cut:], *(instant + lap for instant in trace[:cut]))
