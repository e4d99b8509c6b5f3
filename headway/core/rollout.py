"""Rules of a rollout: how much traffic the new version gets, and when there is enough evidence against it.

Each test compares the two versions' shares of hits (failures, or slow answers) in blocks of requests that finished at the same
time. So trouble that affects both versions counts against neither. A bet on an alternative grows by its likelihood ratio. For
the hypothesis that the new version isn't worse, the ratio uses one joint share of both. This makes the bet an e-variable for
that hypothesis: A. Turner, A. Ly, P. Grünwald, "Generic E-variables for exact sequential k-sample tests that allow for optional
stopping", J. Stat. Plan. Inference 230 (2024), section 2. Shares of a block between 0 and 1 count like outcomes of a coin, as
in I. Waudby-Smith, A. Ramdas, "Estimating means of bounded random variables by betting", J. R. Stat. Soc. B 86 (2024). By
Ville's inequality, if the new version isn't worse, the mean of the bets ever reaches 1/p with a probability of at most p,
however often one looks. This remains true if a bet counts for less than it has won. All steps and tests of a rollout share
ERROR_RATE."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from headway.core.versions import Weights
from headway.model import Rollout, RolloutState, VersionCounts, WorkerInfo, WorkerStatus
from headway.model.rollout import Block, Evidence

ERROR_RATE = 0.008  # Highest probability, over all steps and tests, of rolling back a version that isn't worse.
FAILURES, P95 = "failures", "p95"
TESTS = (FAILURES, P95)  # Tests that may end a rollout.
MOST_STEPS = 20
LONGEST_STEP = 7 * 86400.0  # Longest step in seconds.
MOST_KEPT = 64  # Limit on the versions of earlier rollouts in a record: the last promoted one, and the latest losers.
SLOWER = 0.25  # Default share by which the new version's P95 may exceed the other's.
MOST_SLOWER = 10.0

# Alternatives to bet on: the odds of a hit for the new version divided by the other's, and the most that a block adds to the
# log of the bet. So a list of bad inputs, or a stall of a few seconds, isn't enough evidence, however many requests fail.
ALTERNATIVES = ((2.0, 0.7), (6.0, 1.0), (40.0, 1.4), (2000.0, 2.1))
OUTCOMES_BLOCK = 0.9  # Shortest block of outcomes in seconds: two looks, which may come slightly early or late.
LATENCIES_BLOCK = 1.9  # Shortest block of latencies in seconds: four looks. Only the share of slow answers counts.
LEAST_LATENCIES = 20  # Answers of the other version after which its P95 is known well enough.
USUAL_FAILURES, USUAL_SLOW = 0.01, 0.05  # Expected shares of hits at the start.

_GROWTH = 1.1  # Factor from the upper bound of one bucket of latencies to the next.
_SHORTEST = 0.0005  # Upper bound in seconds of bucket 0.


class NoRollout(Exception):
    """A rollout is impossible; the message says why."""


class Unknown(NoRollout):
    """There is no such model, version or rollout."""


def begun(plan: Rollout, workers: Sequence[WorkerInfo], last: Rollout | None) -> Rollout:
    """Return the rollout to start for a plan. `last` is the model's last rollout, if any. By default, the new version is
    compared with the only other version that takes requests. Raises Unknown if the model or a version has no worker, NoRollout
    if no rollout is possible."""
    if last is not None and last.running:
        raise NoRollout(
            f"a rollout of version {last.version} of {plan.model!r} is under way; promote or abort it first"
        )
    _check_plan(plan)
    there = _versions(plan.model, workers)
    _check_served(plan.model, plan.version, there)
    left = {} if last is None else left_by(last)
    others = sorted(version for version in there - {plan.version} if left.get(version) != 0.0)
    if plan.beside:
        _check_served(plan.model, plan.beside, there)
        others = [plan.beside]
    if len(others) != 1 or plan.version in others:
        served = f"versions {', '.join(others)} are" if others else "no other version is"
        raise NoRollout(
            f"{served} served beside version {plan.version} of {plan.model!r}; name the one to compare with as `beside`"
        )
    held = {version: weight for version, weight in left.items() if not weight or version in there}
    before = _before(held, plan.version, others[0])
    return replace(plan, beside=others[0], before=before, revision=1 if last is None else last.revision + 1)


def _before(left: Weights, version: str, beside: str) -> dict[str, float]:
    """Return the weights that a new rollout keeps from earlier ones."""
    kept = {name: weight for name, weight in left.items() if name != version}
    if not any(kept.values()) and (left.get(version) or beside in kept):
        kept[beside] = 100.0  # If the new version loses, this one must serve: no other is known to do well.
    while len(kept) > MOST_KEPT:
        del kept[next(name for name, weight in kept.items() if not weight)]
    return kept


def decided(last: Rollout | None, state: RolloutState, model: str, workers: Sequence[WorkerInfo]) -> Rollout:
    """Return a model's last rollout as ended by an operator (PROMOTED or ABORTED), even if it had already ended differently.
    Raises Unknown if there was none, or if no worker serves the winner."""
    if last is None:
        raise Unknown(f"model {model!r} has had no rollout")
    winner = last.version if state is RolloutState.PROMOTED else last.beside
    _check_served(model, winner, _versions(model, workers))
    return replace(last, state=state, reason="by an operator", revision=last.revision + 1)


def _versions(model: str, workers: Sequence[WorkerInfo]) -> set[str]:
    """Return a model's versions that have a worker. Raises Unknown if it has no worker."""
    gone = (WorkerStatus.OFFLINE, WorkerStatus.FAILED)
    own = [worker for worker in workers if worker.model == model and worker.status not in gone]
    if not own:
        raise Unknown(f"model {model!r} has no worker")
    return {worker.version for worker in own if worker.version}


def _check_served(model: str, version: str, there: Collection[str]) -> None:
    if version not in there:
        listed = (
            f"those that serve are {', '.join(sorted(there))}" if there else "its workers have no versions of their own"
        )
        raise Unknown(f"no worker serves version {version!r} of {model!r}; {listed}")


def _check_plan(plan: Rollout) -> None:
    steps, every, tests = plan.steps, plan.every, plan.rollback_on
    grows = all(step < following for step, following in itertools.pairwise(steps))
    if not steps or not grows or not (steps[0] > 0.0 and steps[-1] <= 100.0):
        shown = ",".join(f"{step:g}" for step in steps)
        raise NoRollout(f"steps {shown!r} must be increasing percentages, above 0 and at most 100, as in 1,10,50,100")
    if len(steps) > MOST_STEPS:
        raise NoRollout(f"{len(steps)} steps are more than {MOST_STEPS}")
    if not 1.0 <= every <= LONGEST_STEP:
        raise NoRollout(f"a step of {every:g} s is not between 1 s and {LONGEST_STEP / 86400:g} days")
    if not {*tests} <= {*TESTS} or len({*tests}) != len(tests):
        raise NoRollout(f"rollback_on {','.join(tests)!r} is not one or both of {', '.join(TESTS)}, or none")
    if not 0.0 <= plan.slower <= MOST_SLOWER:
        raise NoRollout(f"slower {plan.slower:g} is not between 0 and {MOST_SLOWER:g}")


def left_by(rollout: Rollout) -> dict[str, float]:
    """Return the weights after a rollout: 100 for the last promoted version, 0 for versions that lost."""
    if rollout.state is RolloutState.PROMOTED:
        return {**dict.fromkeys(rollout.before, 0.0), rollout.beside: 0.0, rollout.version: 100.0}
    return {**rollout.before, rollout.version: 0.0}


def weights_of(rollout: Rollout | None, configured: Weights, there: Collection[str]) -> Weights:
    """Return the weights of a model's versions. `there` are the versions that have a worker. A running rollout sets the weights
    of its two versions. Afterwards, the weights of `left_by` apply if they give weight to a version that has a worker.
    Otherwise the configured weights apply, but a version that lost still gets 0."""
    if rollout is None:
        return configured
    left = left_by(rollout)
    lost = {version: 0.0 for version, weight in left.items() if not weight}
    if rollout.running:
        return {**lost, rollout.beside: 100.0 - rollout.percent, rollout.version: rollout.percent}
    if any(weight and version in there for version, weight in left.items()):
        return left
    return {**configured, **lost}


def bucket_of(seconds: float) -> int:
    """Return the bucket of a latency. Each bucket is a tenth wider than the one before it."""
    return max(math.ceil(math.log(max(seconds, 1e-9) / _SHORTEST) / math.log(_GROWTH)), 0)


def bound_of(bucket: int) -> float:
    """Return the upper bound in seconds of a bucket."""
    return _SHORTEST * _GROWTH**bucket


def p95_of(latencies: Mapping[int, int]) -> int:
    """Return the bucket of the 95th percentile; 0 if there are no latencies."""
    left, above = 0.05 * sum(latencies.values()), 0
    for bucket in sorted(latencies, reverse=True):
        above += latencies[bucket]
        if above > left:
            return bucket
    return 0


def counted(counts: VersionCounts, more: VersionCounts) -> VersionCounts:
    """Return the sum of two counts."""
    return VersionCounts(
        counts.answered + more.answered, counts.failed + more.failed, _sum(counts.latencies, more.latencies)
    )


def watched(rollout: Rollout, seconds: float, new: VersionCounts, old: VersionCounts) -> Rollout:
    """Return the rollout as it is `seconds` later, given the requests of both versions that finished in that time. It has more
    evidence, and may be a step further, promoted or rolled back. A step ends once its time is over and the new version has had
    a request; the last step, unless it is 100 %, ends when somebody promotes or aborts the rollout."""
    evidence = rollout.evidence
    evidence = replace(evidence, new=counted(evidence.new, new), old=counted(evidence.old, old))
    evidence = _with_outcomes(evidence, _filled(evidence.outcomes, seconds, new, old))
    allowed = math.ceil(math.log1p(rollout.slower) / math.log(_GROWTH) - 1e-9)
    evidence = _with_latencies(evidence, _filled(evidence.latencies, seconds, new, old), allowed)
    after = replace(rollout, waited=rollout.waited + seconds, evidence=evidence)
    if reason := _verdict(after):
        return replace(after, state=RolloutState.ROLLED_BACK, reason=reason)
    if after.waited < after.every or not evidence.new.count or after.step + 1 == len(after.steps):
        return after
    if after.steps[after.step + 1] == 100.0:
        return replace(after, state=RolloutState.PROMOTED, step=after.step + 1, reason="all steps are done")
    return replace(after, step=after.step + 1, waited=0.0, evidence=Evidence())


def _filled(block: Block, seconds: float, new: VersionCounts, old: VersionCounts) -> Block:
    return Block(block.seconds + seconds, counted(block.new, new), counted(block.old, old))


def _with_outcomes(evidence: Evidence, block: Block) -> Evidence:
    """Return the evidence with a block of outcomes added, unless the block is too short or lacks a version."""
    new, old = block.new, block.old
    if block.seconds < OUTCOMES_BLOCK or not (new.count and old.count):
        return replace(evidence, outcomes=block)
    before, failed = evidence.old.count - old.count, evidence.old.failed - old.failed
    usual = (failed + USUAL_FAILURES) / (before + 1.0)
    bets = _bet(evidence.failures, (new.count, new.failed), (old.count, old.failed), usual)
    return replace(evidence, failures=bets, outcomes=Block())


def _with_latencies(evidence: Evidence, block: Block, allowed: int) -> Evidence:
    """Return the evidence with a block of latencies added, if usable. The new version may be slower by `allowed` buckets."""
    new, old = block.new.latencies, block.old.latencies
    if block.seconds < LATENCIES_BLOCK or not (new and old):
        return replace(evidence, latencies=block)
    bets, (slow, blocks) = evidence.p95, evidence.slow
    past = {bucket: count - old.get(bucket, 0) for bucket, count in evidence.old.latencies.items()}
    if sum(past.values()) >= LEAST_LATENCIES:
        limit = p95_of(past)
        of_old = _share_above(old, limit)
        usual = (slow + USUAL_SLOW) / (blocks + 1.0)
        bets = _bet(bets, (1.0, _share_above(new, limit + allowed)), (1.0, of_old), usual)
        slow, blocks = slow + of_old, blocks + 1
    return replace(evidence, p95=bets, latencies=Block(), slow=(slow, blocks))


def _bet(bets: Sequence[float], new: tuple[float, float], old: tuple[float, float], usual: float) -> tuple[float, ...]:
    """Update the bets with one more block of requests, and return the logarithms of their values. `bets` holds the previous logarithms, and
    is empty before the first block. `new` and `old` are pairs for the two versions: the number of requests in the block, and the number of
    hits among them. `usual` is the old version's share of hits in earlier blocks."""
    (count, hits), (others, other_hits) = new, old
    usual = min(max(usual, 1e-6), 0.99)
    grown = []
    for before, (odds, most) in zip(bets or (0.0,) * len(ALTERNATIVES), ALTERNATIVES, strict=True):
        worse = odds * usual / (1.0 - usual + odds * usual)
        joint = (count * worse + others * usual) / (count + others)
        grows = (
            hits * math.log(worse / joint)
            + (count - hits) * math.log((1.0 - worse) / (1.0 - joint))
            + other_hits * math.log(usual / joint)
            + (others - other_hits) * math.log((1.0 - usual) / (1.0 - joint))
        )
        grown.append(before + min(grows, most))
    return tuple(grown)


def _verdict(rollout: Rollout) -> str:
    """Return the reason to roll back, or an empty string while there isn't enough evidence."""
    evidence, share = rollout.evidence, f"of {rollout.percent:g} %"
    tests = sum(step < 100.0 for step in rollout.steps) * len(rollout.rollback_on)
    enough = math.log(tests / ERROR_RATE) if tests else math.inf
    new, old = evidence.new, evidence.old
    if FAILURES in rollout.rollback_on and _mean(evidence.failures) >= enough:
        said = (
            f"{new.failed} of {new.count} requests failed, and {old.failed} of {old.count} of version {rollout.beside}"
        )
        return f"fails more, at the step {share}: {said}"
    if P95 in rollout.rollback_on and _mean(evidence.p95) >= enough:
        there = f"{bound_of(p95_of(old.latencies)) * 1000:.3g} ms of version {rollout.beside}"
        return f"slower, at the step {share}: P95 {bound_of(p95_of(new.latencies)) * 1000:.3g} ms, against {there}"
    return ""


def _mean(bets: Sequence[float]) -> float:
    if not bets:
        return 0.0
    most = max(bets)
    return most + math.log(sum(math.exp(bet - most) for bet in bets) / len(bets))


def _share_above(latencies: Mapping[int, int], limit: int) -> float:
    return sum(count for bucket, count in latencies.items() if bucket > limit) / sum(latencies.values())


def _sum(counts: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
    return {bucket: counts.get(bucket, 0) + more.get(bucket, 0) for bucket in counts.keys() | more.keys()}
