"""Tasks over HTTP: `/v1/result/{task_id}`, to poll one, to wait for it, and to forget it.

A tenant sees its own tasks. All others, those that never were, those that are forgotten, and those of other tenants,
are answered alike: 404. That takes one look at the broker, by tenant and id together.

A wait ends with the outcome, its time, the client's departure, or this process's shutdown. Polls do not count towards a
limit of requests: the outcome was paid for when it was asked for. But each poll costs the broker a call or two, so
polls have a limit of their own (`Limiter.poll`), and a large outcome counts as several.
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
from headway.http.inference.octets import OCTETS, Form, octet_pieces, read_accept
from headway.http.problem import Problem, escaped, problem
from headway.http.requests import JSON, Request, RouteAnswer, StreamedAnswer, refuse, without_reason
from headway.http.routing import Authentication, Route
from headway.model import EntryState, Failure, Reply
from headway.runtime.race import race

PATH = "/v1/result"
"""Path before the id of a task."""

LONGEST_WAIT = 60.0
"""Most seconds that one request waits for an outcome."""

_ID = re.compile(r"(?:req_)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_WAIT = re.compile(r"[0-9]+(?:\.[0-9]+)?")


class TaskRun(msgspec.Struct, gc=False):
    """Facts of the run of a task that has an output."""

    tokens_used: int | None
    model_version: str


class Result(msgspec.Struct, gc=False, omit_defaults=True):
    """State of a task, with its output if there is one, or its failure."""

    task_id: str
    status: str
    output: str | None = None
    metadata: TaskRun | None = None
    error: Problem | None = None


def routes(gateway: Gateway, known: Authentication) -> list[Route]:
    """Route of tasks, for known principals."""
    tasks = _Tasks(gateway)
    return [Route(f"{PATH}/{{task_id}}", known(tasks.answer), ("GET", "DELETE"))]


class _Tasks:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, request: Request) -> RouteAnswer:
        principal = request.principal
        found = _ID.fullmatch(request.params["task_id"])
        wait = _wait(request)
        try:
            if found is None:
                raise NotFound(failures.no_task().message)
            id = found[1].lower()
            if request.method == "DELETE":
                response = await self._forget(principal.tenant, id)
            else:
                response = await self._tell(request, principal.tenant, id, wait)
                size = int(response.headers.get("content-length", len(response.body)))
                if size >= CHARGED and principal.limits:
                    self._gateway.limiter.charge_polls(principal.limits, size // CHARGED)
        except RequestError as exc:
            response = refuse(request, without_reason(exc))
        except BrokerUnavailable:
            response = refuse(request, self._gateway.out_of_reach())
        response.headers["cache-control"] = "no-store"
        return response

    async def _tell(self, request: Request, tenant: str, id: str, wait: float) -> RouteAnswer:
        gateway = self._gateway
        known = await gateway.outcome(tenant, id)
        if isinstance(known, EntryState) and wait > 0.0:
            known = await self._follow(request, tenant, id, wait) or await gateway.outcome(tenant, id)
        if known is None:
            raise NotFound(failures.no_task().message)
        if isinstance(known, EntryState):
            return _as_json(Result(ID_PREFIX + id, "PENDING"), {"retry-after": "1"})
        raw = read_accept(request.fields, Form.JSON) is Form.OCTETS
        response = await self._outcome(known, id, raw)
        if not gateway.broker.kept.keeps(
            known
        ):  # It came to who waited for it; who asks next hears that it was too large.
            response.headers["x-headway-kept"] = "no"
        return response

    async def _follow(self, request: Request, tenant: str, id: str, wait: float) -> Reply | None:
        """Outcome of a task, if it comes before the wait has to end."""
        told, *_ = await race(self._gateway.follow(tenant, id, wait), request.left(), request.shut.wait())
        return None if told is None else told.result()

    async def _outcome(self, reply: Reply, id: str, raw: bool) -> RouteAnswer:
        """Answer with an outcome. A large one is made, and sent, in turns of its tenant.

        Arguments:
            reply: reply with the outcome.
            id: id of the task.
            raw: whether an output is the body.

        Raises:
            BadRequest: the output is tensors that cannot be sent in this form.
        """
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
        return _as_json(Result(shown, "FAILED", error=problem(failure, shown)))

    async def _pieces(self, pieces: Iterator[bytes], tenant: str, media_type: str) -> RouteAnswer:
        """Answer with a body that is made of pieces. A large one is not put together: to copy 15 MB holds up the loop."""
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
    """Seconds that the client wants to wait, as far as it may."""
    values = request.query.get("wait")
    if not values:
        return 0.0
    if len(values) > 1 or _WAIT.fullmatch(values[0]) is None:
        raise BadRequest(f"wait is {values[0][:60]!r}; expected one number of seconds, for example ?wait=20")
    return min(float(values[0]), LONGEST_WAIT)


def _as_json(result: Result, fields: dict[str, str] | None = None) -> RouteAnswer:
    return RouteAnswer(msgspec.json.encode(result), 200, fields, JSON)
