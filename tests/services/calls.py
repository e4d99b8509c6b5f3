"""Calls of tests: how the next one of a gateway to its broker ends, what they offered, and requests with several inputs."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headway.gateway.client_quotas import AnswerRoom
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import Gateway
from headway.model import Entry, Failure, Principal, Reply, RequestOptions, Value
from tests.services.fake_backend import ANYBODY
from tests.services.fleet import Fleet
from tests.services.requests import request


def once(name: str, mode: str, times: int = 1) -> Callable[[str], str | None]:
    """The next call, or calls, of this name end like that."""
    left = [mode] * times
    return lambda called: left.pop() if called == name and left else None


def offered(fleet: Fleet, since: int = 0) -> list[Entry]:
    return [entry for _, _, entries in fleet.server.named("enqueue")[since:] for entry in entries]


def enqueue_takes(fleet: Fleet, seconds: float = 0.0, failure: Failure | None = None) -> None:
    """Have the broker take so long for an enqueue, and refuse all of it, if there is a failure."""
    enqueue = fleet.server.inner.enqueue

    async def call(entries: Sequence[Entry]) -> Sequence[Failure | None]:
        await asyncio.sleep(seconds)
        return await enqueue(entries) if failure is None else [failure] * len(entries)

    fleet.server.inner.enqueue = call  # type: ignore[method-assign]


def failure_of(reply: Reply) -> Failure:
    assert reply.failure is not None
    return reply.failure


def several(
    gateway: Gateway,
    inputs: Sequence[Value],
    caller: Principal = ANYBODY,
    options: RequestOptions | None = None,
    *,
    room: AnswerRoom | None = None,
    **how: Any,
) -> tuple[FanOut, asyncio.Future[Sequence[Reply]]]:
    """Begin a request with several inputs; the future ends with its replies. `how` is as in `request`."""
    ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
    fan_out = FanOut(gateway, request("", caller, options, **how), inputs, ended.set_result, room)
    fan_out.start()
    return fan_out, ended
