"""Closed loop of gRPC calls to one method, in a process of its own.

    python bench/stand/grpc_client.py ADDRESS --seconds 5 --connections 4 --calls 64      headway.v1.Inference/Predict
    python bench/stand/grpc_client.py ADDRESS --infer MODEL    ModelInfer of the Open Inference Protocol, one text in a call

Prints as JSON how many were answered, and how many failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import grpc
import uvloop

from headway.grpc import messages
from headway.oip.tensors import pack

TEXT = b"the quick brown fox " * 5


class Method(NamedTuple):
    """Method that is called: its path, the message of a request, and whether an answer is the right one."""

    path: str
    body: bytes
    is_right: Callable[[bytes], bool]


def predict() -> Method:
    """Predict of Headway's own service."""
    answer = messages.message("headway.v1.PredictResponse")
    return Method(
        "/headway.v1.Inference/Predict",
        messages.message("headway.v1.PredictRequest")(input_data=TEXT).SerializeToString(),
        lambda body: bool(answer.FromString(body).output == TEXT.upper()),
    )


def infer(model: str) -> Method:
    """ModelInfer of the Open Inference Protocol, with a tensor of one text."""
    request = messages.message("inference.ModelInferRequest")(model_name=model, raw_input_contents=[pack([TEXT])])
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    answer, right = messages.message("inference.ModelInferResponse"), [pack([TEXT.upper()])]
    return Method(
        "/inference.GRPCInferenceService/ModelInfer",
        request.SerializeToString(),
        lambda body: list(answer.FromString(body).raw_output_contents) == right,
    )


async def load(address: str, method: Method, seconds: float, connections: int, calls: int) -> tuple[int, int]:
    """Answered and failed calls of so many that are always in hand."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
    until, answered, failed = monotonic() + seconds, 0, 0

    async def ask(channel: grpc.aio.Channel) -> None:
        nonlocal answered, failed
        call = channel.unary_unary(method.path)
        while monotonic() < until:
            try:
                right = method.is_right(await call(method.body, timeout=30.0))
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
    parser.add_argument("--infer", metavar="MODEL", help="call ModelInfer for this model, in place of Predict")
    options = parser.parse_args()
    method = infer(options.infer) if options.infer else predict()
    answered, failed = uvloop.run(load(options.address, method, options.seconds, options.connections, options.calls))
    print(json.dumps({"answered": answered, "failed": failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
