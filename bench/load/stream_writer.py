"""A tenant that writes streams of messages over gRPC as fast as the server takes them, by a client that heeds flow control."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from bench.load.worst import Worst
from headway.grpc import messages

_METHOD = f"/{messages.OPEN_INFERENCE}/ModelStreamInfer"


async def write_streams(
    worst: Worst, address: tuple[str, int], key: str, numbers: Iterator[int], answers: Counter[str]
) -> None:
    """One connection of it with all its streams, each made again whenever it ends. Counts what was sent and answered."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}", options=options) as channel:
        await asyncio.gather(*(_write(worst, channel, key, numbers, answers) for _ in range(worst.streams)))


async def _write(
    worst: Worst, channel: grpc.aio.Channel, key: str, numbers: Iterator[int], answers: Counter[str]
) -> None:
    while True:
        call: Any = channel.stream_stream(_METHOD)(metadata=(("authorization", f"Bearer {key}"),))
        reading = asyncio.create_task(_read(call, answers))
        try:
            while True:
                await call.write(worst.request(next(numbers)))
                answers["sent"] += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            answers["ended"] += 1
            await asyncio.sleep(0.05)
        finally:
            reading.cancel()


async def _read(call: Any, answers: Counter[str]) -> None:
    """Count the answers of a stream until it ends."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for answer in call:
            answers["answered" if len(answer) > 10_000 else "refused"] += 1
