"""Dead letter routes: list, show, replay and purge. Lists don't include inputs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.admin.process import ProcessView, id_in, instant, tier_name
from headway.core import tensor_json
from headway.core.tensors import header_of, shown_heads
from headway.core.trace_context import read_carried
from headway.core.values import embedded
from headway.doors.fields import ID_PREFIX
from headway.doors.readiness import within_answer_time
from headway.errors import BadRequest, NotFound
from headway.http.problem import escaped
from headway.http.routing import Request, Route, RouteAnswer, as_json, refusal
from headway.model import DeadLetter, InferenceRequest, Principal, RequestOptions, Tensors, Value
from headway.runtime.request_id import new_id

LISTED = 100  # Default number of dead letters in a list.
MOST_LISTED = 10_000

_NUMBER = re.compile(r"[1-9][0-9]{0,4}")


async def _shown(value: Value) -> str | msgspec.Raw:
    """Return a value for the JSON encoder. Yields to other tasks while numbers are written."""
    if not isinstance(value, Tensors):
        return embedded(value)
    pieces = []
    for piece in tensor_json.pieces(value, strict=False):
        pieces.append(piece)
        await asyncio.sleep(0)
    return msgspec.Raw(b"".join(pieces))


def routes(process: ProcessView) -> list[Route]:
    """Return the routes at and below `/internal/dlq`."""
    on = _Routes(process)
    return [
        Route("/internal/dlq", on.listing),
        Route("/internal/dlq/{id}", on.letter, ("GET", "DELETE")),
        Route("/internal/dlq/{id}/replay", on.replay, ("POST",)),
    ]


class _Routes:
    def __init__(self, process: ProcessView) -> None:
        self._process = process
        self._letters = process.letters
        self._tiers = process.settings.tier_names

    async def listing(self, request: Request) -> RouteAnswer:
        limit = request.param("limit")
        if limit is None:
            limit = str(LISTED)
        if _NUMBER.fullmatch(limit) is None or int(limit) > MOST_LISTED:
            raise BadRequest(f"limit={limit[:20]!r} is not a whole number from 1 to {MOST_LISTED}")
        letters = await within_answer_time(self._letters.list(int(limit)))
        listed = [_described(letter, self._tiers) for letter in letters]
        return as_json({"count": await within_answer_time(self._letters.count()), "letters": listed})

    async def letter(self, request: Request) -> RouteAnswer:
        if request.method == "DELETE":
            id, tenant = id_in(request), request.param("tenant")
            if tenant is None:
                _only(id, await within_answer_time(self._letters.find(id)))
            if not await within_answer_time(self._letters.remove(id, tenant)):
                raise _no_letter(id, tenant)
            return RouteAnswer(status=204)
        letter = await self._find(request)
        entry = letter.entry
        parameters = msgspec.Raw(entry.parameters or b"{}")
        tensors = {"tensors": shown_heads(header_of(entry.input).heads)} if isinstance(entry.input, Tensors) else {}
        return as_json({
            **_described(letter, self._tiers), **tensors, "input": await _shown(entry.input), "parameters": parameters
        })  # fmt: skip

    async def replay(self, request: Request) -> RouteAnswer:
        gateway = self._process.gateway
        if gateway is None:
            raise NotFound(
                f"a {self._process.role.value} accepts no requests; replay it at the admin port of a gateway"
            )
        letter = await self._find(request)
        entry, fresh = letter.entry, new_id()
        begun = self._process.clock()
        principal = Principal(user="dead letter replay", tenant=entry.tenant, tier=entry.tier)
        longest = self._process.settings.longest_request_s
        # The replay links to the span of the failed request, if that was sampled.
        died = carried.context if (carried := read_carried(entry.trace)) is not None else None
        options = RequestOptions(longest, entry.tier, origin="", way="replay", replays=died)
        reply = await gateway.ask(
            InferenceRequest(principal, fresh, options, entry.model, entry.input, entry.parameters)
        )
        if reply.failure is not None:
            # The replay may have left a dead letter of its own. Only the original one is kept.
            await within_answer_time(self._letters.remove(fresh, entry.tenant))
            return refusal(ID_PREFIX + fresh, reply.failure)
        await within_answer_time(self._letters.remove(entry.id, entry.tenant))
        output = reply.output or ""
        return as_json({
            "request_id": ID_PREFIX + fresh,
            "replayed": ID_PREFIX + entry.id,
            "output": escaped(output) if isinstance(output, str) else await _shown(output),
            "latency_ms": round((self._process.clock() - begun) * 1000, 3),
        })  # fmt: skip

    async def _find(self, request: Request) -> DeadLetter:
        id, tenant = id_in(request), request.param("tenant")
        letter = _only(id, await within_answer_time(self._letters.find(id, tenant)))
        if letter is None:
            raise _no_letter(id, tenant)
        return letter


def _only(id: str, letters: Sequence[DeadLetter]) -> DeadLetter | None:
    """Return the only dead letter, or None if there is none. Raises BadRequest if several tenants have one with this id."""
    if len(letters) > 1:
        tenants = ", ".join(sorted(repr(letter.entry.tenant) for letter in letters))
        raise BadRequest(
            f"{len(letters)} tenants have a dead letter {ID_PREFIX}{id}: {tenants}; add ?tenant=NAME to choose one"
        )
    return letters[0] if letters else None


def _described(letter: DeadLetter, tiers: tuple[str, ...]) -> dict[str, Any]:
    entry = letter.entry
    return {
        "id": ID_PREFIX + entry.id,
        "model": entry.model,
        "tenant": entry.tenant,
        "tier": tier_name(entry.tier, tiers),
        "error": escaped(letter.error),
        "cause": letter.cause,
        "attempts": letter.attempts,
        "worker": letter.worker,
        "model_version": letter.version or None,
        "batch_id": letter.batch_id or None,
        "died_at": instant(letter.died_at),
    }


def _no_letter(id: str, tenant: str | None) -> NotFound:
    of = "" if tenant is None else " of this tenant"
    return NotFound(
        f"no dead letter {ID_PREFIX}{id}{of}; it was replayed, purged or displaced by newer ones, or never existed"
    )
