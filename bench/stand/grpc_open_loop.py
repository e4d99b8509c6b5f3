"""Open loop of gRPC calls to Predict, in a process of its own.

    python bench/stand/grpc_open_loop.py ADDRESS --seconds 10 --rate 50 --connections 1

Prints as JSON the milliseconds of each call, from the instant at which it was due, and how many failed, by status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

import grpc
import uvloop

from bench.stand.grpc_client import TEXT, predict

PATIENCE = 60.0
"""Seconds after which a call is given up."""


async def load(address: str, rate: float, seconds: float, connections: int, key: str) -> dict[str, Any]:
    """Poisson arrivals over some seconds, in turn by so many connections, each call without a deadline of its own."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
    method, dice, loop = predict(), random.Random(1), asyncio.get_running_loop()
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    found: list[float] = []
    failed: Counter[str] = Counter()

    async def ask(channel: grpc.aio.Channel, due: float) -> None:
        try:
            answer = await channel.unary_unary(method.path)(method.body, metadata=metadata, timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            failed[error.code().name] += 1
        else:
            failed["wrong"] += not method.is_right(answer)
            found.append((loop.time() - due) * 1000)

    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    asked: list[asyncio.Task[None]] = []
    due = loop.time()
    until = due + seconds
    while due < until:
        await asyncio.sleep(max(due - loop.time(), 0.0))
        asked.append(asyncio.create_task(ask(channels[len(asked) % connections], due)))
        due += dice.expovariate(rate)
    await asyncio.gather(*asked)
    for channel in channels:
        await channel.close()
    return {"milliseconds": found, "failed": {status: count for status, count in failed.items() if count}}


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Open loop of gRPC calls with the text {TEXT.decode()[:20]!r}.")
    parser.add_argument("address")
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--key", default="")
    given = parser.parse_args()
    print(json.dumps(uvloop.run(load(given.address, given.rate, given.seconds, given.connections, given.key))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
