"""Tasks over HTTP: poll a task at `/v1/result/{task_id}`, wait for its outcome, or delete it.

A tenant sees only its own tasks. Unknown tasks, deleted tasks and other tenants' tasks all get the same 404.

A wait ends when the outcome arrives, the time is up, the client leaves, or this process shuts down. Polls don't count as requests,
because the task has already been charged. They have their own limit (`Limiter.poll`), because each poll costs the broker one or two
calls. Fetching a large outcome counts as several polls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import msgspec

from headway.core import failures
from headway.doors.answer_pieces import HOLE, PIECE, LargeAnswer, value_within
from headway.doors.entrance import CHARGED
from headway.doors.fields import ID_PREFIX
from headway.errors import BACKEND_ERROR, AnyError, BadRequest, BrokerUnavailable, NotFound, RequestError
from headway.gateway.gateway import Gateway
from headway.http.inference.codecs import OCTETS, Form, octet_pieces, read_accept
from headway.http.problem import Problem, escaped, problem
from headway.http.routing import (
    JSON,
    Authentication,
    Request,
    Route,
    RouteAnswer,
    StreamedAnswer,
    as_json,
    refuse,
    without_reason,
)
from headway.model import EntryState, Failure, Reply
from headway.runtime.race import race

PATH = "/v1/result"

LONGEST_WAIT = 60.0

_ID = re.compile(r"(?:req_)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_WAIT = re.compile(r"[0-9]+(?:\.[0-9]+)?")


class TaskRun(msgspec.Struct, gc=False):
    """Metadata of a task that has an output."""

    tokens_used: int | None
    model_version: str


class Result(msgspec.Struct, gc=False, omit_defaults=True):
    """The state of a task, and its output or failure."""

    task_id: str
    status: str
    output: str | None = None
    metadata: TaskRun | None = None
    error: Problem | None = None


def routes(gateway: Gateway, known: Authentication) -> list[Route]:
    """Return the route for tasks."""
    return [Route(f"{PATH}/{{task_id}}", known(_Tasks(gateway).answer), ("GET", "DELETE"))]


class _Tasks:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, request: Request) -> RouteAnswer:
        principal = request.principal
        match = _ID.fullmatch(request.params["task_id"])
        wait = _wait(request)
        try:
            if match is None:
                raise NotFound(failures.no_task().message)
            id = match[1].lower()
            if request.method == "DELETE":
                response = await self._forget(principal.tenant, id)
            else:
                response = await self._poll(request, principal.tenant, id, wait)
                size = int(response.headers.get("content-length", len(response.body)))
                if size >= CHARGED and principal.limits:
                    self._gateway.limiter.charge_polls(principal.limits, size // CHARGED)
        except RequestError as exc:
            response = refuse(request, without_reason(exc))
        except BrokerUnavailable:
            response = refuse(request, self._gateway.out_of_reach())
        response.headers["cache-control"] = "no-store"
        return response

    async def _poll(self, request: Request, tenant: str, id: str, wait: float) -> RouteAnswer:
        gateway = self._gateway
        state = await gateway.outcome(tenant, id)
        if isinstance(state, EntryState) and wait > 0.0:
            state = await self._follow(request, tenant, id, wait) or await gateway.outcome(tenant, id)
        if state is None:
            raise NotFound(failures.no_task().message)
        if isinstance(state, EntryState):
            return as_json(Result(ID_PREFIX + id, "PENDING"), headers={"retry-after": "1"})
        raw = read_accept(request.fields, Form.JSON) is Form.OCTETS
        response = await self._outcome(state, id, raw)
        if not gateway.broker.kept.keeps(state):  # Too large to store: only a waiting client gets the outcome.
            response.headers["x-headway-kept"] = "no"
        return response

    async def _follow(self, request: Request, tenant: str, id: str, wait: float) -> Reply | None:
        outcome, *_ = await race(self._gateway.follow(tenant, id, wait), request.left(), request.shut.wait())
        return None if outcome is None else outcome.result()

    async def _outcome(self, reply: Reply, id: str, raw: bool) -> RouteAnswer:
        """Return the answer for an outcome. If `raw`, the body is the output itself. Raises BadRequest if that isn't possible."""
        gateway, shown, output = self._gateway, ID_PREFIX + id, reply.output
        failure: AnyError
        if output is not None:
            try:
                if raw:
                    return await self._pieces(octet_pieces(output), reply.tenant, OCTETS.decode())
                used, ran = reply.tokens, reply.ran
                version = (ran.version if ran is not None else "") or gateway.settings.model_version
                metadata = TaskRun(None if used is None else used.used, version)
                document = msgspec.json.encode(Result(shown, "SUCCESS", HOLE, metadata))
                return await self._pieces(value_within(document, output), reply.tenant, JSON)
            except UnicodeEncodeError:
                failure = failures.no_text()
            except RequestError as exc:
                if exc.code != BACKEND_ERROR:
                    raise
                failure = exc
        else:
            failure = failures.failure_of(reply)
        failure = Failure(failure.code, escaped(failure.message), failure.retry_after)
        return as_json(Result(shown, "FAILED", error=problem(failure, shown)))

    async def _pieces(self, pieces: Iterator[bytes], tenant: str, media_type: str) -> RouteAnswer:
        """Return an answer, built piece by piece as the tenant gets turns. Joining a large body would block the event loop."""
        answer, turns = LargeAnswer(pieces, None), self._gateway.turns
        await answer.made(turns, tenant)
        if answer.length <= PIECE:
            return RouteAnswer(b"".join(iter(answer.take, b"")), media_type=media_type)
        sent = partial(answer.sent, turns, tenant)
        return StreamedAnswer(sent, {"content-length": str(answer.length)}, media_type)

    async def _forget(self, tenant: str, id: str) -> RouteAnswer:
        if await self._gateway.outcome(tenant, id) is None:
            raise NotFound(failures.no_task().message)
        await self._gateway.cancel(tenant, id)
        return RouteAnswer(status=204)


def _wait(request: Request) -> float:
    values = request.query.get("wait")
    if not values:
        return 0.0
    if len(values) > 1 or _WAIT.fullmatch(values[0]) is None:
        raise BadRequest(f"wait is {values[0][:60]!r}; expected a single number of seconds, for example ?wait=20")
    return min(float(values[0]), LONGEST_WAIT)
