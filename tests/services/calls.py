"""Calls of tests: how the next one of a gateway to its broker ends, what they offered, and requests with several inputs."""

import asyncio
from collections.abc import Callable, Sequence

from headway.gateway.client_quotas import AnswerRoom
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import Gateway
from headway.model import Entry, Failure, InferenceRequest, Principal, Reply, RequestOptions, Value
from headway.runtime.request_id import new_id
from tests.services.fake_backend import ANYBODY
from tests.services.fleet import Fleet


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
    id: str = "",
    model: str = "m",
    parameters: bytes = b"",
    room: AnswerRoom | None = None,
) -> tuple[FanOut, asyncio.Future[Sequence[Reply]]]:
    """Begin a request with several inputs; the future ends with its replies."""
    ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
    options = options or RequestOptions(4.0, 1)
    request = InferenceRequest(caller, id or new_id(), options, model, parameters=parameters)
    fan_out = FanOut(gateway, request, inputs, ended.set_result, room)
    fan_out.start()
    return fan_out, ended
