"""Closed loop of calls to `headway.v1.Inference/Predict`, or to a server that speaks the same, in a process of its own.

    python bench/stand/grpc_client.py ADDRESS --seconds 5 --connections 4 --calls 64

Prints as JSON how many were answered, and how many failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from time import monotonic

import grpc
import uvloop

from headway.grpc import messages

PREDICT = "/headway.v1.Inference/Predict"
TEXT = b"the quick brown fox " * 5


async def load(address: str, seconds: float, connections: int, calls: int) -> tuple[int, int]:
    """Answered and failed calls of so many that are always in hand."""
    body = messages.message("headway.v1.PredictRequest")(input_data=TEXT).SerializeToString()
    answer = messages.message("headway.v1.PredictResponse")
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
    until, answered, failed = monotonic() + seconds, 0, 0

    async def ask(channel: grpc.aio.Channel) -> None:
        nonlocal answered, failed
        method = channel.unary_unary(PREDICT)
        while monotonic() < until:
            try:
                right = answer.FromString(await method(body, timeout=30.0)).output == TEXT.upper()
            except grpc.aio.AioRpcError:
                right = False
            answered += right
            failed += not right

    await asyncio.gather(*(ask(channels[number % connections]) for number in range(calls)))
    for channel in channels:
        await channel.close()
    return answered, failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Closed loop of gRPC calls.")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--calls", type=int, default=64, help="in hand at once (default %(default)d)")
    options = parser.parse_args()
    answered, failed = uvloop.run(load(options.address, options.seconds, options.connections, options.calls))
    print(json.dumps({"answered": answered, "failed": failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
