"""Counts what became of requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from headway.gateway.pending import Ending, PendingRequest
from headway.model import BatchRun, Reply
from headway.runtime.counters import Counters


@dataclass(slots=True)
class _Answers:
    """Answers of one model and tier that came together."""

    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    failed: int = 0


class OutcomeCounts:
    """Observer that writes counters.

    Arguments:
        counters: of the process.
        tiers: names of the tiers.
        models: names that are served; other names are labels of no series.
    """

    def __init__(self, counters: Counters, tiers: Sequence[str], models: Collection[str]) -> None:
        self._counters = counters
        self._tiers = tiers
        self._models = models

    def finished(self, requests: Sequence[PendingRequest]) -> None:
        """Count requests that have ended; answers that came together are counted together."""
        told: dict[tuple[str, int], _Answers] = {}
        sampled: BatchRun | None = None
        for request in requests:
            reply = request.reply
            if request.ending is not Ending.REPLIED or reply is None:
                self._count_other(request)
                continue
            entry, ran = request.entry, reply.ran
            latency = request.ended_at - request.since
            answers = told.get((entry.model, entry.tier))
            if answers is None:
                answers = told[entry.model, entry.tier] = _Answers()
            answers.latencies.append(latency)
            answers.waits.append(0.0 if reply.kept else reply.queued)
            if reply.failure is not None:
                answers.failed += 1
                self._count(request, reply.failure.code.lower())
            if reply.shared is not None:
                self._counters.shared[entry.model, reply.shared.value, "kept" if reply.kept else "joined"] += 1
            elif ran is not sampled and ran is not None:
                sampled = ran
                self._counters.overhead_seconds.observe(max(0.0, latency - reply.queued - ran.seconds))
        for (model, tier), answers in told.items():
            self._count_answers(model, self._tiers[tier], answers)

    def _count_answers(self, model: str, tier: str, answers: _Answers) -> None:
        counters = self._counters
        counters.request_seconds[model, tier].observe_all(answers.latencies)
        counters.queue_seconds[model, tier].observe_all(answers.waits)
        counters.requests[model, tier, "ok"] += len(answers.latencies) - answers.failed

    def _count_other(self, request: PendingRequest) -> None:
        """Count one that did not end by a reply. A refusal is no latency: it takes no time, and in an overload there are so
        many that they would hide how slow the others are."""
        if request.ending is Ending.LEFT:
            self._count(request, "cancelled")
            return
        reply: Reply | None = request.reply
        if reply is None or reply.failure is None:
            return
        self._count(request, reply.failure.code.lower())
        tier = self._tiers[request.entry.tier]
        if request.ending is Ending.TIMED_OUT:
            self._counters.request_seconds[request.entry.model, tier].observe(request.ended_at - request.since)
        elif reply.failure.reason:
            self._counters.refusals[reply.failure.reason, tier] += 1

    def _count(self, request: PendingRequest, outcome: str) -> None:
        model = request.entry.model if request.entry.model in self._models else ""
        self._counters.requests[model, self._tiers[request.entry.tier], outcome] += 1
