"""Bare grpc.aio server of `headway.v1.Inference/Predict`: each text in capitals, at once.

python bench/stand/grpc_bare.py PORT
"""

import asyncio
import sys
from typing import Any

import grpc
import uvloop

from headway.grpc import messages

REQUEST = messages.message("headway.v1.PredictRequest")
RESPONSE = messages.message("headway.v1.PredictResponse")


async def predict(request: Any, context: Any) -> Any:
    return RESPONSE(request_id="bare", output=request.input_data.upper(), latency_ms=0.0)


async def main(port: int) -> None:
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(predict, REQUEST.FromString, RESPONSE.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.HEADWAY, {"Predict": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("up", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
