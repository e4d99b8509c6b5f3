"""Counts of the outcomes of requests: of all, of single tenants that ask for theirs, and by version while a rollout is under way."""

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
"""Workers of which the last batch is known. Workers that have left count too, until all are forgotten."""

MOST_TENANTS = 100
"""Tenants whose tokens are counted by themselves; those of any other count under OTHER. The ledger has each."""
OTHER = "other"
MOST_ASKING = 256
"""Tenants that are counted by themselves. One more takes the place of the one that has not asked for the longest."""
_COUNTED = (Ending.REPLIED, Ending.ANSWERED, Ending.TIMED_OUT)
"""Endings that tell something of a version."""


def outcome_of(failure: Failure) -> str:
    """Outcome under which a failure is counted: the error that its client is shown."""
    return errors.SHOWN.get(failure.code, failure.code).lower()


class _Answers(msgspec.Struct):
    """Answers of one model and tier that came together."""

    latencies: list[float] = msgspec.field(default_factory=list)
    waits: list[float] = msgspec.field(default_factory=list)
    failed: int = 0
    failed_seconds: float = 0.0


class OutcomeCounts:
    """Observer that writes counters.

    Arguments:
        counters: counters of the process.
        tiers: names of the tiers.
        models: names of the models that are served; other names get no series.
    """

    def __init__(self, counters: GatewayCounts, tiers: Sequence[str], models: Container[str]) -> None:
        self._counters = counters
        self._tiers = tiers
        self._models = models
        self._last_runs: dict[str, float] = {}
        """Broker instant of the claim of the last batch that was counted, by worker."""
        self._rows = Counter[tuple[str, float]]()
        """Rows beyond one of each of the requests that are counted now, by worker and claim of their batch."""

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count requests that have ended; answers that came together are counted together."""
        if ending is Ending.ANSWERED:  # By lanes, which tensors take only as single rows.
            self._count_batch(requests, now)
            return
        if ending is not Ending.REPLIED:
            for request in requests:
                self._count_other(request, ending, now)
            return
        told: dict[tuple[str, int], _Answers] = {}
        sampled: BatchRun | None = None
        model, tier, answers, rows = "", -1, _Answers(), False
        add_latency, add_wait = answers.latencies.append, answers.waits.append
        for request in requests:
            entry, reply, latency = request.entry, request.reply, now - request.since
            if entry.tier != tier or entry.model != model:
                model, tier = entry.model, entry.tier
                answers = told.setdefault((model, tier), _Answers())
                add_latency, add_wait = answers.latencies.append, answers.waits.append
                if not rows and isinstance(entry.input, Tensors):  # Asked once for each model and tier.
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
        for (model, tier), answers in told.items():
            self._count_answers(model, self._tiers[tier], answers)

    def _count_rows(self, requests: Sequence[PendingRequest]) -> None:
        """Count the rows of tensors that ran, those beyond one of each request."""
        self._rows.clear()
        for request in requests:
            entry, reply = request.entry, request.reply
            if reply.ran is not None and reply.shared is None and (more := rows_of(entry.input) - 1):
                self._rows[reply.ran.worker, reply.ran.claimed_at] += more
                if reply.failure is None:
                    self._counters.more_rows[entry.model] += more

    def _count_batch(self, requests: Sequence[PendingRequest], now: float) -> None:
        """Count requests that were answered by one batch."""
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
        """Count tokens of a tenant. The tenants that use some first have counts of their own."""
        tenants, tenant = self._counters.token_tenants, entry.tenant
        if tenant not in tenants:
            if len(tenants) >= MOST_TENANTS:
                tenant = OTHER
            else:
                tenants.add(tenant)
        self._counters.tokens[entry.model, tenant, how] += used

    def _count_run(self, model: str, run: BatchRun, now: float) -> None:
        """Count a batch, once, however its replies come."""
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
        """Count a request that did not end by a reply.

        A refusal is no latency: it takes no time, and an overload has so many that they would hide the others'
        latencies.
        """
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
        """Model of an entry; empty for one that is not served, as clients could make up any number of them."""
        return entry.model if entry.model in self._models else ""


class TenantCounts:
    """Observer that counts by tenant, from a tenant's first question on: nothing is counted for those that never ask.

    Arguments:
        tiers: names of the tiers.
        models: names of the models that are served; other names get no series.
        begin: called with these counts at the first question, from which on they are told of requests.
    """

    def __init__(self, tiers: Sequence[str], models: Container[str], begin: Callable[[TenantCounts], None]) -> None:
        self._tiers, self._models, self._begin = tiers, models, begin
        self._counts: dict[str, tuple[GatewayCounts, OutcomeCounts]] = {}
        """Counts of each tenant and what adds to them; the tenant that asked last is the last."""

    def of(self, tenant: str) -> GatewayCounts:
        """Counts of a tenant's own requests, which are counted from now on."""
        if not self._counts:
            self._begin(self)
        found = self._counts.pop(tenant, None)
        if found is None:
            counters = GatewayCounts()
            found = counters, OutcomeCounts(counters, self._tiers, self._models)
            if len(self._counts) >= MOST_ASKING:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant] = found
        return found[0]

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count the requests of tenants that have asked; see `headway.gateway.pending.Observer`."""
        of_tenants: dict[str, list[PendingRequest]] = {}
        for request in requests:
            if request.entry.tenant in self._counts:
                of_tenants.setdefault(request.entry.tenant, []).append(request)
        for tenant, own in of_tenants.items():
            self._counts[tenant][1].finished(own, ending, now)

    def forget(self, model: str) -> None:
        """Forget what was counted of a model that requests no longer come for."""
        for counters, _ in self._counts.values():
            counters.forget(model)


class _Sums(msgspec.Struct):
    """Requests of one version so far."""

    answered: int = 0
    failed: int = 0
    latencies: dict[int, int] = msgspec.field(default_factory=dict)


class RolloutCounts:
    """Observer that counts for rollouts, while there is any.

    Arguments:
        observe: called with these counts, and whether they are told of requests from now on.
    """

    def __init__(self, observe: Callable[[RolloutCounts, bool], None]) -> None:
        self._observe = observe
        self._of_models: dict[str, dict[str, _Sums]] = {}

    def follow(self, rollouts: Sequence[Rollout]) -> None:
        """Count for these rollouts, and for no others."""
        wanted = {one.model: {one.version, one.beside} for one in rollouts if one.running}
        before, self._of_models = self._of_models, {
            model: own if (own := self._of_models.get(model, {})).keys() == versions else {each: _Sums() for each in versions}
            for model, versions in wanted.items()
        }  # fmt: skip
        if bool(before) is not bool(self._of_models):
            self._observe(self, bool(self._of_models))

    @property
    def active(self) -> bool:
        """Whether there is any."""
        return bool(self._of_models)

    @property
    def counts(self) -> dict[str, dict[str, VersionCounts]]:
        """Requests that have ended, by model and version, since its rollout began."""
        return {
            model: {
                version: VersionCounts(one.answered, one.failed, dict(one.latencies)) for version, one in own.items()
            }
            for model, own in self._of_models.items()
        }

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Count requests by the version that was chosen for them; see `headway.gateway.pending.Observer`.

        An answer that another request's run has brought tells nothing. Nor does one that names its version: whoever sends bad inputs to the
        new version alone would have it rolled back.
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
