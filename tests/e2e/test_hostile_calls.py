"""One tenant takes all that it can get on the gRPC port of a running service, and another notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from headway.grpc import messages
from tests.e2e.client import PATIENCE, Gate
from tests.e2e.server import Server, serving
from tests.grpc.stand import PREDICT, predict, predicted
from tests.grpc.test_open_inference import STREAM, outputs, request
from tests.identity.writing import entry, key_of
from tests.servers.ports import Port

Metadata = tuple[tuple[str, str], ...]
Status = grpc.StatusCode

HEAVY, GOOD = ((("authorization", f"Bearer {key_of(name)}"),) for name in ("heavy", "good"))
CALLS = 100
"""Calls that there may be at once, of all tenants."""
MESSAGES = 32
"""Largest messages for which there is room at once, for all tenants."""
BOUNDS = ("--max-connections", str(CALLS), "--max-bodies-mb", "4", "--max-body-bytes", str((4 << 20) // MESSAGES))
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("calls")
    keys = [entry(name, tenant=name, more="rate = 0") for name in ("heavy", "good")]
    (folder / "keys.toml").write_text("\n".join(keys))
    with (
        contextlib.closing(Port()) as port,
        serving(folder, *BOUNDS, "--keys", "keys.toml", "--grpc-port", str(port.number), lawful=False) as server,
    ):
        yield server
        assert server.metrics().value("requests_total", outcome="internal") == 0
        gc.collect()  # Calls of gRPC's client hold each other, and with them their connections.


@contextlib.asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Any]:
    """A channel with a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=options) as channel:
        yield channel


def asked(channel: Any, metadata: Metadata, text: str) -> Any:
    """A call of Predict that was begun."""
    return channel.unary_unary(PREDICT)(predict(text), metadata=metadata, timeout=PATIENCE)


async def told(channel: Any, metadata: Metadata) -> str:
    """What came of a call with an input of its own: `ok`, whose output must be right, or why it was refused."""
    text = f"text {next(_numbers)}"
    call = asked(channel, metadata, text)
    try:
        assert predicted(await call).output == text.upper().encode()
    except grpc.aio.AioRpcError as exc:
        trailers = {key: str(value) for key, value in exc.trailing_metadata() or ()}
        return trailers.get("x-headway-dropped-reason") or trailers.get("x-headway-error") or f"{exc.code()}"
    return "ok"


async def streamed(channel: Any, metadata: Metadata) -> Any:
    """A stream that is left open once its first message is answered; None if it was refused for want of room."""
    call = channel.stream_stream(STREAM)(metadata=metadata, timeout=PATIENCE)
    text = f"text {next(_numbers)}"
    try:
        await call.write(request(text).SerializeToString())
        body = await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # It ended before it was written to.
        body = grpc.aio.EOF
    if body is grpc.aio.EOF:
        if await call.code() is Status.INTERNAL:  # It ended as it was written to; the client doesn't know of what.
            return await streamed(channel, metadata)
        trailers = dict(await call.trailing_metadata())
        assert (await call.code(), trailers["x-headway-dropped-reason"]) == (Status.RESOURCE_EXHAUSTED, "bodies")
        return None
    answer = messages.message("inference.ModelStreamInferResponse").FromString(body)
    assert outputs(answer.infer_response) == [text.upper().encode()]
    return call


async def is_well(server: Server, shared: Any) -> None:
    """The good neighbour gets its answers, on connections of its own and on one that the other tenant uses, too."""
    async with connected(server) as own:
        for channel in (own, shared):
            assert [await told(channel, GOOD) for _ in range(5)] == ["ok"] * 5
            stream = await streamed(channel, GOOD)
            assert stream is not None, "the good neighbour has no room for a stream"
            await stream.done_writing()
            assert await stream.code() is Status.OK


async def is_served_again(channel: Any) -> None:
    """What the bad neighbour held is free once the service has heard that it left."""
    async with asyncio.timeout(PATIENCE):
        while await told(channel, HEAVY) != "ok":
            pass


def test_calls_left_open_leave_room(server: Server) -> None:
    async def main() -> None:
        async with connected(server) as channel:
            for _ in range(2):  # More in all than there may be: each that is cancelled is given back.
                calls = [channel.stream_unary(PREDICT)(metadata=HEAVY, timeout=PATIENCE) for _ in range(CALLS + 50)]
                codes = [asyncio.ensure_future(call.code()) for call in calls]
                for code in itertools.islice(asyncio.as_completed(codes, timeout=PATIENCE), 50):
                    assert await code is Status.RESOURCE_EXHAUSTED
                await is_well(server, channel)
                for call in calls:
                    call.cancel()
                assert set(await asyncio.gather(*codes)) == {Status.RESOURCE_EXHAUSTED, Status.CANCELLED}
                await is_served_again(channel)

    asyncio.run(main())


def test_streams_left_open_leave_room(server: Server) -> None:
    async def main() -> None:
        async with connected(server) as channel:
            streams = [await streamed(channel, HEAVY)]
            while streams[-1] is not None:
                assert len(streams) < MESSAGES, "one tenant has all the room that there is"
                streams.append(await streamed(channel, HEAVY))
            await is_well(server, channel)
            for stream in streams[:-1]:
                stream.cancel()
            await is_served_again(channel)

    asyncio.run(main())


def test_calls_cancelled_in_the_queue_leave_the_batch_to_others(server: Server) -> None:
    async def main() -> None:
        gate = Gate(server.folder)
        async with connected(server) as channel, connected(server) as own:
            first = asyncio.ensure_future(asked(channel, HEAVY, gate.text()))
            await asyncio.to_thread(gate.reached)
            waiting = [asked(channel, HEAVY, f"never read {number}") for number in range(40)]
            await asyncio.to_thread(server.queued, 40)
            good = [asyncio.ensure_future(told(own, GOOD)) for _ in range(5)]
            await asyncio.to_thread(server.queued, 45)
            for call in waiting:
                call.cancel()
            await asyncio.to_thread(server.queued, 5)
            gate.open()
            assert await asyncio.gather(*good) == ["ok"] * 5
            await first

    asyncio.run(main())
