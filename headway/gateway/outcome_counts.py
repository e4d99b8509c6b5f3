"""Counts of the outcomes of all requests, of tenants that ask for counts of their own, and by version during a rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from operator import attrgetter

import msgspec

from headway import errors
from headway.core.rollout import bucket_of
from headway.core.tensors import rows_of
from headway.gateway.pending import Ending, PendingRequest
from headway.model import BatchRun, Entry, Failure, Rollout, Tensors, VersionCounts
from headway.runtime.counters import GatewayCounts

_WEIGHT = attrgetter("entry.weight")
_SINCE, _QUEUED, _TIER = attrgetter("since"), attrgetter("reply.queued"), attrgetter("entry.tier")
MOST_WORKERS = 10_000
"""Maximum number of workers whose last batch is remembered. At that number all are forgotten, including workers that have left."""
MOST_TENANTS = 100
"""Maximum number of tenants whose tokens have counts of their own. The tokens of others count under OTHER."""
OTHER = "other"
MOST_ASKING = 256
"""Maximum number of tenants with counts of their own. One more replaces the tenant that hasn't asked for the longest time."""
_COUNTED = (Ending.REPLIED, Ending.ANSWERED, Ending.TIMED_OUT)
"""Endings that say something about the version."""


def outcome_of(failure: Failure) -> str:
    """Return the outcome label of a failure, which is the error that the client gets, in lower case."""
    return errors.SHOWN.get(failure.code, failure.code).lower()


class _Answers(msgspec.Struct):
    """Answers of one model and tier in one call of `finished`."""

    latencies: list[float] = msgspec.field(default_factory=list)
    waits: list[float] = msgspec.field(default_factory=list)
    failed: int = 0
    failed_seconds: float = 0.0


class OutcomeCounts:
    """Observer that updates counters. `models` are the served models. Other names get no series."""

    def __init__(self, counters: GatewayCounts, tiers: Sequence[str], models: Container[str]) -> None:
        self._counters, self._tiers, self._models = counters, tiers, models
        self._last_runs: dict[str, float] = {}
        """Claim of the last batch counted, by worker, as an instant of the broker."""
        self._rows = Counter[tuple[str, float]]()
        """Rows beyond the first of each request, by worker and claim of their batch, for one call of `finished`."""

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        if ending is Ending.ANSWERED:  # They took lanes, where tensors have a single row.
            self._count_batch(requests, now)
            return
        if ending is not Ending.REPLIED:
            for request in requests:
                self._count_other(request, ending, now)
            return
        by_label: dict[tuple[str, int], _Answers] = {}
        sampled: BatchRun | None = None
        model, tier, answers, rows = "", -1, _Answers(), False
        add_latency, add_wait = answers.latencies.append, answers.waits.append
        for request in requests:
            entry, reply, latency = request.entry, request.reply, now - request.since
            if entry.tier != tier or entry.model != model:
                model, tier = entry.model, entry.tier
                answers = by_label.setdefault((model, tier), _Answers())
                add_latency, add_wait = answers.latencies.append, answers.waits.append
                if not rows and isinstance(entry.input, Tensors):  # Checked once for each model and tier.
                    rows = True
                    if max(map(_WEIGHT, requests)) > 1:
                        self._count_rows(requests)
            add_latency(latency)
            add_wait(0.0 if reply.kept else reply.queued)
            if reply.failure is not None:
                answers.failed += 1
                answers.failed_seconds += latency
                self._count(entry, outcome_of(reply.failure))
            if reply.tokens is not None:
                self._count_tokens(entry, reply.tokens.used, "shared" if reply.shared is not None else "run")
            if reply.shared is not None:
                self._counters.shared[model, reply.shared.value, "kept" if reply.kept else "joined"] += 1
            elif reply.ran is not sampled and reply.ran is not None:
                sampled = reply.ran
                self._count_run(model, sampled, now)
                self._counters.overhead_seconds.observe(max(0.0, latency - reply.queued - sampled.seconds))
        for (model, tier), answers in by_label.items():
            self._count_answers(model, self._tiers[tier], answers)

    def _count_rows(self, requests: Sequence[PendingRequest]) -> None:
        """Count the rows of tensors that ran, beyond the first of each request."""
        self._rows.clear()
        for request in requests:
            entry, reply = request.entry, request.reply
            if reply.ran is not None and reply.shared is None and (more := rows_of(entry.input) - 1):
                self._rows[reply.ran.worker, reply.ran.claimed_at] += more
                if reply.failure is None:
                    self._counters.more_rows[entry.model] += more

    def _count_batch(self, requests: Sequence[PendingRequest], now: float) -> None:
        first = requests[0]
        model, ran, tiers = first.entry.model, first.reply.ran, set(map(_TIER, requests))
        for tier in tiers:
            own = requests if len(tiers) == 1 else [request for request in requests if request.entry.tier == tier]
            answers = _Answers([now - since for since in map(_SINCE, own)], list(map(_QUEUED, own)))
            self._count_answers(model, self._tiers[tier], answers)
        if ran is not None:
            self._count_run(model, ran, now)
            self._counters.overhead_seconds.observe(max(0.0, now - first.since - first.reply.queued - ran.seconds))

    def _count_tokens(self, entry: Entry, used: int, how: str) -> None:
        """Count tokens, by tenant for the first MOST_TENANTS tenants that use any."""
        tenants, tenant = self._counters.token_tenants, entry.tenant
        if tenant not in tenants:
            if len(tenants) >= MOST_TENANTS:
                tenant = OTHER
            else:
                tenants.add(tenant)
        self._counters.tokens[entry.model, tenant, how] += used

    def _count_run(self, model: str, run: BatchRun, now: float) -> None:
        """Count a batch once, even if its replies come in several calls."""
        self._counters.last_answer[model] = now
        if self._last_runs.get(run.worker) == run.claimed_at:
            return
        if len(self._last_runs) >= MOST_WORKERS:
            self._last_runs.clear()
        self._last_runs[run.worker] = run.claimed_at
        total = self._counters.runs[model, run.size + self._rows.pop((run.worker, run.claimed_at), 0)]
        total.count += 1
        total.seconds += run.seconds

    def _count_answers(self, model: str, tier: str, answers: _Answers) -> None:
        counters = self._counters
        counters.request_seconds[model, tier].observe_all(answers.latencies)
        counters.queue_seconds[model, tier].observe_all(answers.waits)
        if answers.failed:
            counters.failed_seconds[model] += answers.failed_seconds
        counters.requests[model, tier, "ok"] += len(answers.latencies) - answers.failed

    def _count_other(self, request: PendingRequest, ending: Ending, now: float) -> None:
        """Count a request without a reply. Latencies of refusals don't count, because they would hide all others in an overload."""
        entry, failure = request.entry, request.reply.failure
        if ending is Ending.LEFT:
            self._count(entry, "cancelled")
        elif failure is not None:
            self._count(entry, outcome_of(failure))
            tier = self._tiers[entry.tier]
            if ending is Ending.TIMED_OUT:
                self._counters.request_seconds[entry.model, tier].observe(now - request.since)
                self._counters.failed_seconds[entry.model] += now - request.since
            elif failure.reason:
                self._counters.refusals[failure.reason, tier, self._known(entry)] += 1

    def _count(self, entry: Entry, outcome: str) -> None:
        self._counters.requests[self._known(entry), self._tiers[entry.tier], outcome] += 1

    def _known(self, entry: Entry) -> str:
        """Return the model of an entry; empty if it isn't served, because clients could make up any number of names."""
        return entry.model if entry.model in self._models else ""


class TenantCounts:
    """Observer that counts for each tenant, from the first time that the tenant asks for its counts. Others cost nothing.

    `begin` is called with these counts when the first tenant asks, to register the observer.
    """

    def __init__(self, tiers: Sequence[str], models: Container[str], begin: Callable[[TenantCounts], None]) -> None:
        self._tiers, self._models, self._begin = tiers, models, begin
        self._counts: dict[str, tuple[GatewayCounts, OutcomeCounts]] = {}
        """Counts of each tenant and the observer that updates them, in the order in which tenants last asked."""

    def of(self, tenant: str) -> GatewayCounts:
        """Return the counts of a tenant's requests since it first asked."""
        if not self._counts:
            self._begin(self)
        counts = self._counts.pop(tenant, None)
        if counts is None:
            counters = GatewayCounts()
            counts = counters, OutcomeCounts(counters, self._tiers, self._models)
            if len(self._counts) >= MOST_ASKING:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant] = counts
        return counts[0]

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        of_tenants: dict[str, list[PendingRequest]] = {}
        for request in requests:
            if request.entry.tenant in self._counts:
                of_tenants.setdefault(request.entry.tenant, []).append(request)
        for tenant, own in of_tenants.items():
            self._counts[tenant][1].finished(own, ending, now)

    def forget(self, model: str) -> None:
        """Drop the counts of a model that is no longer served."""
        for counters, _ in self._counts.values():
            counters.forget(model)


class _Sums(msgspec.Struct):
    answered: int = 0
    failed: int = 0
    latencies: dict[int, int] = msgspec.field(default_factory=dict)


class RolloutCounts:
    """Observer that counts by version during rollouts.

    `observe` is called with these counts and True to register the observer, or False to remove it.
    """

    def __init__(self, observe: Callable[[RolloutCounts, bool], None]) -> None:
        self._observe = observe
        self._of_models: dict[str, dict[str, _Sums]] = {}

    def follow(self, rollouts: Sequence[Rollout]) -> None:
        """Count for exactly these rollouts from now on."""
        wanted = {rollout.model: {rollout.version, rollout.beside} for rollout in rollouts if rollout.running}
        before, self._of_models = self._of_models, {
            model: own if (own := self._of_models.get(model, {})).keys() == versions else {each: _Sums() for each in versions}
            for model, versions in wanted.items()
        }  # fmt: skip
        if bool(before) is not bool(self._of_models):
            self._observe(self, bool(self._of_models))

    @property
    def active(self) -> bool:
        return bool(self._of_models)

    @property
    def counts(self) -> dict[str, dict[str, VersionCounts]]:
        """Requests that have ended since the rollout began, by model and version."""
        return {
            model: {
                version: VersionCounts(sums.answered, sums.failed, dict(sums.latencies))
                for version, sums in own.items()
            }
            for model, own in self._of_models.items()
        }

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count requests by the version chosen for them.

        Shared answers don't count. Nor do requests that name a version, because a client could then have a version rolled back by
        sending it bad inputs.
        """
        if ending not in _COUNTED:
            return
        for request in requests:
            entry, reply = request.entry, request.reply
            sums = self._of_models.get(entry.model, {}).get(entry.version)
            if sums is None or reply.shared is not None or entry.pinned:
                continue
            if reply.failure is not None:
                sums.failed += 1
                continue
            sums.answered += 1
            bucket = bucket_of(now - request.since)
            sums.latencies[bucket] = sums.latencies.get(bucket, 0) + 1
