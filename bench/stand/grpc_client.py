"""gRPC calls to one method in a closed loop, in a process of its own. Prints as JSON how many were answered, and how many failed.

python bench/stand/grpc_client.py ADDRESS --seconds 5 --calls 64          headway.v1.Inference/Predict
python bench/stand/grpc_client.py ADDRESS --infer MODEL                   ModelInfer of the Open Inference Protocol, one text a call
python bench/stand/grpc_client.py ADDRESS --infer MODEL --tensor FP32 4   ModelInfer with one row of zeros
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc
import uvloop

from headway.core.tensors import SIZES
from headway.grpc import messages
from headway.oip.tensors import pack

TEXT = b"the quick brown fox " * 5
PATIENCE = 60.0
"""Seconds after which a call is given up."""
CONNECTIONS = 4


class Method(NamedTuple):
    path: str
    body: bytes
    is_right: Callable[[bytes], bool]


def predict() -> Method:
    answer = messages.message("headway.v1.PredictResponse")
    return Method(
        "/headway.v1.Inference/Predict",
        messages.message("headway.v1.PredictRequest")(input_data=TEXT).SerializeToString(),
        lambda body: bool(answer.FromString(body).output == TEXT.upper()),
    )


def infer(model: str, tensor: Sequence[str]) -> Method:
    """Return ModelInfer with a row of zeros of a datatype and shape; where none is given, with a text."""
    datatype, shape = (tensor[0], [1, *map(int, tensor[1:])]) if tensor else ("BYTES", [1, 1])
    data = bytes(SIZES[datatype] * math.prod(shape)) if tensor else pack([TEXT])
    right = bytes(8) if tensor else pack([TEXT.upper()])
    request = messages.message("inference.ModelInferRequest")(model_name=model, raw_input_contents=[data])
    request.inputs.add(name="x" if tensor else "text", datatype=datatype, shape=shape)
    answer = messages.message("inference.ModelInferResponse")
    return Method(
        "/inference.GRPCInferenceService/ModelInfer",
        request.SerializeToString(),
        lambda body: list(answer.FromString(body).raw_output_contents) == [right],
    )


async def load(address: str, method: Method, seconds: float, calls: int) -> dict[str, int]:
    """Have so many calls in hand all the time."""
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
    parser.add_argument("--infer", metavar="MODEL", help="call ModelInfer for this model, in place of Predict")
    parser.add_argument(
        "--tensor", nargs="+", default=[], metavar="DATATYPE", help="with a row of this datatype and shape"
    )
    options = parser.parse_args()
    method = infer(options.infer, options.tensor) if options.infer else predict()
    print(json.dumps(uvloop.run(load(options.address, method, options.seconds, options.calls))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
