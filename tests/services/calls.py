"""Helpers that script calls to the broker, list the entries offered to it, and send requests with several inputs."""

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
    """Return a `Server.script` that makes the next `times` calls of this name end in this mode."""
    left = [mode] * times
    return lambda called: left.pop() if called == name and left else None


def offered(fleet: Fleet, since: int = 0) -> list[Entry]:
    return [entry for _, _, entries in fleet.server.named("enqueue")[since:] for entry in entries]


def enqueue_takes(fleet: Fleet, seconds: float = 0.0, failure: Failure | None = None) -> None:
    """Make each enqueue take `seconds`. With `failure`, the broker refuses all its entries."""
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
    """Start a request with several inputs. The future resolves to its replies. `how` is passed to `request`."""
    ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
    fan_out = FanOut(gateway, request("", caller, options, **how), inputs, ended.set_result, room)
    fan_out.start()
    return fan_out, ended
