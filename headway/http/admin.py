"""The admin port: health, workers, dead letters, metrics. For operators, never for clients.

Everything but `/livez`, `/readyz` and `/healthz` asks for the service token when one is configured. Without a token the
port listens on loopback only, and answers only to names of loopback: a web page that has its own name resolve
to 127.0.0.1 (DNS rebinding) is turned away.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import __version__, errors, metrics
from headway.config import is_loopback
from headway.errors import BadRequest, NotFound
from headway.gateway import Gateway, new_id
from headway.http import readiness
from headway.http.refusals import handlers, refusal
from headway.model import Caller, DeadLetter, WorkerStatus
from headway.ports import Broker, DeadLetters

ID_PREFIX = "req_"
"""What stands before a request's id wherever people read it."""
LISTED = 100
"""Dead letters in one listing, unless `?limit=` says otherwise."""
MOST_LISTED = 10_000

_OPEN = ("/livez", "/readyz", "/healthz")


def build(gateway: Gateway, broker: Broker, letters: DeadLetters, clock: Callable[[], float]) -> ASGIApp:
    """The admin application.

    Arguments:
        gateway: whose settings, tally and requests are shown, and which replays dead letters.
        broker: whose queue and workers are shown.
        letters: the dead letters.
        clock: the broker's clock, seconds.
    """
    on = _Routes(gateway, broker, letters, clock)
    app = Starlette(
        routes=[
            *readiness.routes(gateway, broker),
            Route("/metrics", on.metrics),
            Route("/internal/health", on.health),
            Route("/internal/workers", on.workers),
            Route("/internal/requests/{id}", on.request),
            Route("/internal/dlq", on.list_letters),
            Route("/internal/dlq/{id}", on.letter, methods=["GET", "DELETE"]),
            Route("/internal/dlq/{id}/replay", on.replay, methods=["POST"]),
        ],
        exception_handlers=handlers(),
    )
    # A redirect would be built from the Host header, which anybody can write.
    app.router.redirect_slashes = False
    return _Guard(app, gateway.settings.admin_token)


class _Guard:
    """Lets in who has the token; without one, who came by a loopback name."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            refused = self._refusal(Headers(scope=scope), scope["state"]["request_id"])
            if refused is not None:
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, id: str) -> Response | None:
        if self._token:
            scheme, _, credential = headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer" and hmac.compare_digest(credential.strip().encode("latin-1"), self._token):
                return None
            return refusal(id, errors.UNAUTHENTICATED, "this route needs the service token: Authorization: Bearer …")
        if is_loopback(_host(headers.get("host", ""))):
            return None
        message = "without a service token this port answers to 127.0.0.1 and localhost only; set HEADWAY_ADMIN_TOKEN"
        return refusal(id, errors.FORBIDDEN, message)


def _host(header: str) -> str:
    """The host in a Host header, without its port."""
    return header.partition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]


class _Routes:
    def __init__(self, gateway: Gateway, broker: Broker, letters: DeadLetters, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._broker = broker
        self._letters = letters
        self._clock = clock

    async def metrics(self, request: Request) -> Response:
        tiers = self._settings.tier_names
        state = await metrics.gather(self._gateway.tally, tiers, self._broker, self._letters)
        return Response(await metrics.exposition(state), media_type=metrics.CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        workers = await self._broker.workers()
        depths = await self._broker.depths()
        census = Counter(worker.status for worker in workers)
        up = [worker.utilisation for worker in workers if worker.status is WorkerStatus.HEALTHY]
        tiers = self._settings.tier_names
        return _json({
            "status": readiness.readiness(self._gateway.draining, workers),
            "gpu_utilization": round(sum(up) / len(up), 4) if up else 0.0,
            "queue_depth": sum(depth.depth for depth in depths),
            "queue_oldest_seconds": round(max((depth.oldest_seconds for depth in depths), default=0.0), 4),
            "requests_per_second": round(self._gateway.requests_per_second, 2),
            "pending": self._gateway.pending,
            "workers": {status.value: census[status] for status in WorkerStatus},
            "queues": [
                {
                    "model": depth.model,
                    "tier": tiers[depth.tier],
                    "depth": depth.depth,
                    "oldest_seconds": round(depth.oldest_seconds, 4),
                }
                for depth in depths
            ],
            "dead_letters": await self._letters.count(),
            "policy": self._settings.policy,
            "version": __version__,
        })  # fmt: skip

    async def workers(self, request: Request) -> Response:
        now, wall = self._clock(), time.time()
        return _json({
            "workers": [
                {
                    "worker_id": worker.worker_id,
                    "model": worker.model,
                    "status": worker.status.value,
                    "utilisation": round(worker.utilisation, 4),
                    "in_flight": worker.in_flight,
                    "last_heartbeat": _instant(wall - (now - worker.last_heartbeat)),
                    "restarts": worker.restarts,
                    "pid": worker.pid,
                }
                for worker in await self._broker.workers()
            ]
        })  # fmt: skip

    async def request(self, request: Request) -> Response:
        id = _id(request)
        known = await self._gateway.status(id)
        if known is None:
            raise NotFound(f"no request {ID_PREFIX}{id} is held, and none among the last ones answered")
        failure = known.failure
        return _json({
            "request_id": ID_PREFIX + id,
            "status": known.stage.value,
            "latency_ms": round(known.seconds * 1000, 3),
            "error": None if failure is None else {"error": failure.code, "message": _text(failure.message)},
        })  # fmt: skip

    async def list_letters(self, request: Request) -> Response:
        text = request.query_params.get("limit", str(LISTED))
        if not (text.isdecimal() and 1 <= int(text[:9]) <= MOST_LISTED):
            raise BadRequest(f"limit={text[:20]!r} is not a whole number from 1 to {MOST_LISTED}")
        letters = await self._letters.list(int(text))
        listed = [_described(letter, self._settings.tier_names) for letter in letters]
        return _json({"count": await self._letters.count(), "letters": listed})

    async def letter(self, request: Request) -> Response:
        id = _id(request)
        if request.method == "DELETE":
            if not await self._letters.remove(id):
                raise _no_letter(id)
            return Response(status_code=204)
        letter = await self._find(id)
        entry = letter.entry
        parameters = msgspec.Raw(entry.parameters or b"{}")
        described = _described(letter, self._settings.tier_names)
        return _json({**described, "input": entry.input, "parameters": parameters})

    async def replay(self, request: Request) -> Response:
        letter = await self._find(_id(request))
        entry, fresh = letter.entry, new_id()
        begun = self._clock()
        reply = await self._gateway.ask(
            Caller(user="dead letter replay", tenant=entry.tenant, tier=entry.tier),
            fresh,
            entry.model,
            entry.input,
            entry.parameters,
            entry.tier,
            self._settings.request_timeout_ms / 1000,
        )
        if reply.failure is not None:
            # It may have died once more, under its fresh id; it stays known under its first.
            await self._letters.remove(fresh)
            failure = reply.failure
            return refusal(ID_PREFIX + fresh, failure.code, failure.message, failure.retry_after, failure.reason)
        await self._letters.remove(entry.id)
        return _json({
            "request_id": ID_PREFIX + fresh,
            "replayed": ID_PREFIX + entry.id,
            "output": _text(reply.output or ""),
            "latency_ms": round((self._clock() - begun) * 1000, 3),
        })  # fmt: skip

    async def _find(self, id: str) -> DeadLetter:
        letter = await self._letters.get(id)
        if letter is None:
            raise _no_letter(id)
        return letter


def _described(letter: DeadLetter, tiers: tuple[str, ...]) -> dict[str, Any]:
    """A letter without its input, which is shown only when one letter is asked for."""
    entry = letter.entry
    return {
        "id": ID_PREFIX + entry.id,
        "model": entry.model,
        "tenant": entry.tenant,
        "tier": tiers[entry.tier],
        "error": _text(letter.error),
        "cause": letter.cause,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "died_at": _instant(letter.died_at),
    }


def _id(request: Request) -> str:
    id: str = request.path_params["id"]
    return id.removeprefix(ID_PREFIX)


def _no_letter(id: str) -> NotFound:
    return NotFound(
        f"no dead letter {ID_PREFIX}{id}; it was replayed or purged, pushed out by newer ones, or never was"
    )


def _text(text: str) -> str:
    """`text` with what is no Unicode escaped, as it may come from a model."""
    return text.encode("utf-8", "backslashreplace").decode()


def _instant(seconds: float) -> str:
    """Unix time as RFC 3339 text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
