"""Rollout routes: list, start, promote and abort. The leading controller takes each rollout through its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headway.admin.process import ProcessView
from headway.core.capacity import STALE_AFTER
from headway.core.rollout import SLOWER, TESTS, NoRollout, Unknown, begun, bound_of, decided, p95_of
from headway.doors.readiness import within_answer_time
from headway.errors import SERVICE_OVERLOADED, BadRequest, NotFound, RequestError
from headway.http.routing import Request, Route, RouteAnswer, as_json
from headway.model import Rollout, RolloutState, VersionCounts, WorkerInfo

TRIES = 5  # Maximum number of attempts to change a rollout while the leader also changes it.

_Change = Callable[[Rollout | None, Sequence[WorkerInfo]], Rollout]


def routes(process: ProcessView) -> list[Route]:
    """Return the routes at and below `/internal/rollouts`. Arguments are in the query."""
    on = _Routes(process)
    return [
        Route("/internal/rollouts", on.listing),
        Route("/internal/rollouts/start", on.start, ("POST",)),
        Route("/internal/rollouts/promote", on.promote, ("POST",)),
        Route("/internal/rollouts/abort", on.abort, ("POST",)),
    ]


class _Routes:
    def __init__(self, process: ProcessView) -> None:
        self._process = process

    async def listing(self, request: Request) -> RouteAnswer:
        rollouts = await within_answer_time(self._process.fleet.rollouts())
        return as_json(
            {"rollouts": [_shown(rollout) for rollout in sorted(rollouts, key=lambda rollout: rollout.model)]}
        )

    async def start(self, request: Request) -> RouteAnswer:
        capacities, now = await within_answer_time(
            asyncio.gather(self._process.fleet.capacities(), self._process.now())
        )
        if not any(now - capacity.measured_at < STALE_AFTER for capacity in capacities):
            raise BadRequest("rollouts need a leading controller, and there is none; start `headway controller`")
        plan = Rollout(
            model=_needed(request, "model"),
            version=_needed(request, "version"),
            beside=request.param("beside") or "",
            steps=tuple(_number("steps", step) for step in _needed(request, "steps").split(",")),
            every=_number("every", _needed(request, "every")),
            rollback_on=tuple(filter(None, _given(request, "rollback_on", ",".join(TESTS)).split(","))),
            slower=_number("slower", _given(request, "slower", str(SLOWER))),
        )
        return await self._change(plan.model, lambda last, workers: begun(plan, workers, last))

    async def promote(self, request: Request) -> RouteAnswer:
        return await self._decide(request, RolloutState.PROMOTED)

    async def abort(self, request: Request) -> RouteAnswer:
        return await self._decide(request, RolloutState.ABORTED)

    async def _decide(self, request: Request, state: RolloutState) -> RouteAnswer:
        model = _needed(request, "model")
        return await self._change(model, lambda last, workers: decided(last, state, model, workers))

    async def _change(self, model: str, change: _Change) -> RouteAnswer:
        fleet, broker = self._process.fleet, self._process.broker
        for _ in range(TRIES):
            rollouts, workers = await within_answer_time(asyncio.gather(fleet.rollouts(), broker.workers()))
            try:
                after = change(next((rollout for rollout in rollouts if rollout.model == model), None), workers)
            except Unknown as exc:
                raise NotFound(str(exc)) from None
            except NoRollout as exc:
                raise BadRequest(str(exc)) from None
            if await within_answer_time(fleet.keep_rollout(after)):
                return as_json(_shown(after))
        message = f"the rollout of {model!r} is being changed by others; try again"
        raise RequestError(message, code=SERVICE_OVERLOADED, retry_after=1.0)


def _given(request: Request, name: str, default: str) -> str:
    value = request.param(name)
    return default if value is None else value


def _needed(request: Request, name: str) -> str:
    value = request.param(name)
    if not value:
        raise BadRequest(f"{name} is missing in the query")
    return value


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadRequest(f"{name}: {text[:20]!r} is not a number") from None


def _shown(rollout: Rollout) -> dict[str, Any]:
    return {
        "model": rollout.model,
        "version": rollout.version,
        "beside": rollout.beside,
        "state": rollout.state.value,
        "percent": rollout.percent,
        "reason": rollout.reason,
        "step": rollout.step,
        "steps": rollout.steps,
        "step_seconds": round(rollout.waited, 1),
        "every": rollout.every,
        "rollback_on": rollout.rollback_on,
        "slower": rollout.slower,
        "new": _counts(rollout.evidence.new),
        "old": _counts(rollout.evidence.old),
    }


def _counts(counts: VersionCounts) -> dict[str, Any]:
    p95 = round(bound_of(p95_of(counts.latencies)), 4) if counts.latencies else None
    return {"answered": counts.answered, "failed": counts.failed, "p95_seconds": p95}
