"""Requests of KServe's clients to a service for strings and arrays. Arguments: `rest` or `grpc`, the port's address, a good key."""

import asyncio
import json
import sys
from itertools import product
from typing import Any

import kserve  # type: ignore[import-not-found]
import numpy as np

PROTOCOL, ADDRESS, KEY, _ = sys.argv[1:]
GRPC = PROTOCOL == "grpc"
AT = () if GRPC else (f"http://{ADDRESS}",)
WAYS = [(True, None), (False, None)] if GRPC else [*product((True, False), (True, False))]
"""Whether inputs, and whether outputs, are binary; over gRPC all outputs are."""
FOUR = np.arange(8, dtype=np.float32).reshape(2, 4)
Way = tuple[bool, bool | None]


def headers() -> Any:
    return [("authorization", f"Bearer {KEY}")] if GRPC else {"authorization": f"Bearer {KEY}"}


def given(name: str, datatype: str, array: Any, way: Way) -> kserve.InferInput:
    tensor = kserve.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=way[0])
    return tensor


async def ask(client: Any, model: str, way: Way, *inputs: kserve.InferInput) -> Any:
    wishes = {} if way[1] is None else {"binary_data_output": way[1]}
    asked = kserve.InferRequest(model, list(inputs), request_id="7", parameters=wishes)
    named = {} if GRPC else {"model_name": model}
    return await client.infer(*AT, asked, **named, headers=headers())


async def texts(client: Any, *sent: str, way: Way) -> list[Any]:
    answer = await ask(client, "default", way, given("INPUT", "BYTES", np.array(sent, dtype=object), way))
    return [_texts(answer.outputs[0]), answer.id]


async def sums(client: Any, array: Any, way: Way) -> list[Any]:
    answer = await ask(client, "sums", way, given("x", "FP32", array, way))
    found = answer.outputs[0].as_numpy()
    return [found.tolist(), list(found.shape), answer.id]


async def rank(client: Any, way: Way) -> list[Any]:
    query, ids = np.array([[1, 2]], np.float32), np.array([[3, 4]])
    answer = await ask(client, "ranker", way, given("query", "FP32", query, way), given("ids", "INT64", ids, way))
    scores, names = answer.outputs
    return [scores.as_numpy().tolist(), _texts(names)]


def _texts(output: Any) -> list[str]:
    return [one if isinstance(one, str) else one.decode() for one in output.as_numpy().ravel().tolist()]


async def main() -> dict[str, Any]:
    rest = kserve.RESTConfig(protocol="v2", timeout=60)
    client = kserve.InferenceGRPCClient(ADDRESS) if GRPC else kserve.InferenceRESTClient(rest)
    return {
        "health": [
            await client.is_server_live(*AT),
            await client.is_server_ready(*AT),
            await client.is_model_ready(*AT, "default", headers=headers()),
        ],
        "texts": [await texts(client, "one", "zwölf", way=way) for way in WAYS],
        "sums": [await sums(client, FOUR, way) for way in WAYS],
        "ranked": [await rank(client, way) for way in WAYS],
    }


json.dump(asyncio.run(main()), sys.stdout)
