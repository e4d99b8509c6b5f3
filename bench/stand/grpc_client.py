"""gRPC calls to one method, in a process of its own: a closed loop, or an open one at a rate.

    python bench/stand/grpc_client.py ADDRESS --seconds 5 --connections 4 --calls 64     headway.v1.Inference/Predict
    python bench/stand/grpc_client.py ADDRESS --infer MODEL    ModelInfer of the Open Inference Protocol, one text in a call
    python bench/stand/grpc_client.py ADDRESS --infer MODEL --tensor FP32 4    the same with one row of zeros
    python bench/stand/grpc_client.py ADDRESS --rate 50        Poisson arrivals

Prints as JSON how many were answered and how many failed, and of an open loop the milliseconds of each call from the instant at
which it was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import uvloop

from headway.core.tensors import SIZES
from headway.grpc import messages
from headway.oip.tensors import pack

TEXT = b"the quick brown fox " * 5
PATIENCE = 60.0
"""Seconds after which a call is given up."""


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


def infer_tensor(model: str, datatype: str, row: Sequence[int]) -> Method:
    """ModelInfer of the Open Inference Protocol, with a tensor of one row of zeros."""
    data = bytes(SIZES[datatype] * math.prod(row))
    request = messages.message("inference.ModelInferRequest")(model_name=model, raw_input_contents=[data])
    request.inputs.add(name="x", datatype=datatype, shape=[1, *row])
    answer = messages.message("inference.ModelInferResponse")
    return Method(
        "/inference.GRPCInferenceService/ModelInfer",
        request.SerializeToString(),
        lambda body: list(answer.FromString(body).raw_output_contents) == [bytes(8)],
    )


class Calls:
    """Calls over some connections; build it in a running loop."""

    def __init__(self, address: str, method: Method, connections: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        self.channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
        self.answered = self.failed = 0
        self.milliseconds: list[float] = []
        self._method = method
        self._loop = asyncio.get_running_loop()

    async def closed(self, seconds: float, calls: int) -> None:
        """Have so many in hand all the time."""
        until = self._loop.time() + seconds

        async def ask_on(channel: grpc.aio.Channel) -> None:
            while self._loop.time() < until:
                await self._ask(channel)

        await asyncio.gather(*(ask_on(self.channels[number % len(self.channels)]) for number in range(calls)))

    async def open(self, seconds: float, rate: float) -> None:
        """Call when it is due."""
        dice, asked = random.Random(1), list[asyncio.Task[None]]()
        await asyncio.gather(*(channel.channel_ready() for channel in self.channels))
        due = self._loop.time()
        until = due + seconds
        while due < until:
            await asyncio.sleep(max(due - self._loop.time(), 0.0))
            asked.append(asyncio.create_task(self._timed(self.channels[len(asked) % len(self.channels)], due)))
            due += dice.expovariate(rate)
        await asyncio.gather(*asked)

    async def _timed(self, channel: grpc.aio.Channel, due: float) -> None:
        if await self._ask(channel):
            self.milliseconds.append((self._loop.time() - due) * 1000)

    async def _ask(self, channel: grpc.aio.Channel) -> bool:
        try:
            answer = await channel.unary_unary(self._method.path)(self._method.body, timeout=PATIENCE)
            right = self._method.is_right(answer)
        except grpc.aio.AioRpcError:
            right = False
        self.answered += right
        self.failed += not right
        return right


async def load(given: argparse.Namespace) -> dict[str, Any]:
    """What became of all calls."""
    method = infer(given.infer) if given.infer else predict()
    if given.tensor:
        method = infer_tensor(given.infer, given.tensor[0], [*map(int, given.tensor[1:])])
    calls = Calls(given.address, method, given.connections)
    await (calls.open(given.seconds, given.rate) if given.rate else calls.closed(given.seconds, given.calls))
    for channel in calls.channels:
        await channel.close()
    return {"answered": calls.answered, "failed": calls.failed, "milliseconds": calls.milliseconds}


def main() -> int:
    parser = argparse.ArgumentParser(description="gRPC calls in a closed loop, or in an open one.")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--calls", type=int, default=64, help="in hand at once (default %(default)d)")
    parser.add_argument("--rate", type=float, default=0.0, help="calls a second, in an open loop")
    parser.add_argument("--infer", metavar="MODEL", help="call ModelInfer for this model, in place of Predict")
    parser.add_argument("--tensor", nargs="+", metavar="DATATYPE", help="with one row of this datatype and shape")
    print(json.dumps(uvloop.run(load(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
