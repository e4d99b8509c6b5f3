"""Makes ModelInfer calls with a row of zeros in a closed loop. Prints as JSON how many were answered, and how many failed.

python bench/stand/grpc_client.py ADDRESS --seconds 5 --calls 64 --infer MODEL --tensor FP32 4
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import grpc
import uvloop

from headway import protos
from headway.core.tensors import SIZES

PATIENCE = 60.0
"""Seconds after which a call is given up."""
CONNECTIONS = 4


class Method(NamedTuple):
    path: str
    body: bytes
    is_right: Callable[[bytes], bool]


def infer(model: str, datatype: str, *row: str) -> Method:
    """Return ModelInfer with a row of zeros of a datatype and shape."""
    shape = [1, *map(int, row)]
    data = bytes(SIZES[datatype] * math.prod(shape))
    request = protos.message("inference.ModelInferRequest")(model_name=model, raw_input_contents=[data])
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    answer = protos.message("inference.ModelInferResponse")
    return Method(
        "/inference.GRPCInferenceService/ModelInfer",
        request.SerializeToString(),
        lambda body: list(answer.FromString(body).raw_output_contents) == [bytes(8)],
    )


async def load(address: str, method: Method, seconds: float, calls: int) -> dict[str, int]:
    """Keep `calls` calls in flight all the time."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
    loop, outcomes = asyncio.get_running_loop(), {"answered": 0, "failed": 0}
    until = loop.time() + seconds

    async def ask_on(channel: grpc.aio.Channel) -> None:
        while loop.time() < until:
            try:
                answer = await channel.unary_unary(method.path)(method.body, timeout=PATIENCE)
                right = method.is_right(answer)
            except grpc.aio.AioRpcError:
                right = False
            outcomes["answered" if right else "failed"] += 1

    await asyncio.gather(*(ask_on(channels[number % CONNECTIONS]) for number in range(calls)))
    for channel in channels:
        await channel.close()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="gRPC calls in a closed loop.")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--calls", type=int, default=64, help="in hand at once (default %(default)d)")
    parser.add_argument("--infer", metavar="MODEL", required=True)
    parser.add_argument("--tensor", nargs="+", metavar="DATATYPE", required=True, help="datatype and shape of the row")
    options = parser.parse_args()
    method = infer(options.infer, *options.tensor)
    print(json.dumps(uvloop.run(load(options.address, method, options.seconds, options.calls))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
