"""What KServe's clients ask of a service of texts and of arrays; its arguments are `rest` or `grpc`, the port's address, a good key, and
one for a request a minute.
"""

import asyncio
import json
import sys
from itertools import product
from typing import Any

import grpc
import kserve  # type: ignore[import-not-found]
import numpy as np
from httpx import HTTPStatusError  # type: ignore[import-not-found]

PROTOCOL, ADDRESS, KEY, SLOW = sys.argv[1:]
GRPC = PROTOCOL == "grpc"
AT = () if GRPC else (f"http://{ADDRESS}",)
WAYS = [(True, None), (False, None)] if GRPC else [*product((True, False), (True, False))]
"""Whether inputs, and whether outputs, are binary; over gRPC all outputs are."""
FOUR = np.arange(8, dtype=np.float32).reshape(2, 4)
Way = tuple[bool, bool | None]


def headers(key: str = KEY) -> Any:
    return [("authorization", f"Bearer {key}")] if GRPC else {"authorization": f"Bearer {key}"}


def given(name: str, datatype: str, array: Any, way: Way) -> kserve.InferInput:
    tensor = kserve.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=way[0])
    return tensor


async def ask(client: Any, model: str, way: Way, *inputs: kserve.InferInput, key: str = KEY, **options: Any) -> Any:
    wishes = {} if way[1] is None else {"binary_data_output": way[1]}
    asked = kserve.InferRequest(model, list(inputs), request_id="7", parameters=wishes)
    named = {} if GRPC else {"model_name": model}
    return await client.infer(*AT, asked, **named, headers=headers(key), **options)


async def texts(client: Any, *sent: str, way: Way = WAYS[0], model: str = "default", **options: Any) -> list[Any]:
    answer = await ask(client, model, way, given("INPUT", "BYTES", np.array(sent, dtype=object), way), **options)
    return [_texts(answer.outputs[0]), answer.id]


async def sums(client: Any, array: Any, way: Way = WAYS[0]) -> list[Any]:
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


async def refusal(asked: Any) -> list[Any]:
    """Status of an error, and after how many milliseconds it says to come back, if at all."""
    try:
        await asked
    except grpc.RpcError as exc:
        return [exc.code().name, dict(exc.trailing_metadata() or ()).get("grpc-retry-pushback-ms")]
    except HTTPStatusError as exc:
        return [exc.response.status_code, None]
    raise AssertionError("no error")


async def twice(client: Any) -> None:
    for _ in range(2):
        await texts(client, "a", key=SLOW)


async def main() -> dict[str, Any]:
    rest = kserve.RESTConfig(protocol="v2", timeout=60)
    client = kserve.InferenceGRPCClient(ADDRESS) if GRPC else kserve.InferenceRESTClient(rest)
    refused: dict[str, Any] = {
        "no key": texts(client, "a", key="wrong"),
        "other model": texts(client, "a", model="other"),
        "element": texts(client, "good", "bad"),
        "fault": texts(client, "fault"),
        "rate": twice(client),
        "too large": texts(client, "x" * 2_000_000),
        "datatype": ask(client, "sums", WAYS[0], given("x", "INT32", FOUR.astype("i4"), WAYS[0])),
        "axis": sums(client, FOUR[:, :3]),
        **({"too late": texts(client, "slow", timeout=0.05)} if GRPC else {}),
    }
    return {
        "health": [
            await client.is_server_live(*AT),
            await client.is_server_ready(*AT),
            await client.is_model_ready(*AT, "default", headers=headers()),
        ],
        "texts": [await texts(client, "one", "zwölf", way=way) for way in WAYS],
        "sums": [await sums(client, FOUR, way) for way in WAYS],
        "ranked": [await rank(client, way) for way in WAYS],
        "refusals": {name: await refusal(call) for name, call in refused.items()},
    }


json.dump(asyncio.run(main()), sys.stdout)
