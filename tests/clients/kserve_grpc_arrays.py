"""What KServe's gRPC client asks of a server of arrays; its argument is the port's address."""

import asyncio
import json
import sys
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest  # type: ignore[import-not-found]


def given(name: str, datatype: str, array: Any, raw: bool) -> InferInput:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=raw)
    return tensor


async def ask(client: InferenceGRPCClient, model: str, *inputs: InferInput) -> Any:
    return await client.infer(InferRequest(model, list(inputs), request_id="7"))


async def sums(client: InferenceGRPCClient, array: Any, raw: bool) -> list[Any]:
    answer = await ask(client, "sums", given("x", "FP32", array, raw))
    found = answer.outputs[0].as_numpy()
    return [found.tolist(), list(found.shape), answer.id]


async def rank(client: InferenceGRPCClient, raw: bool) -> dict[str, Any]:
    query, ids = np.array([[1, 2]], np.float32), np.array([[3, 4]])
    answer = await ask(client, "ranker", given("query", "FP32", query, raw), given("ids", "INT64", ids, raw))
    return {one.name: one.as_numpy().tolist() for one in answer.outputs}


async def refusal(asked: Any) -> list[str]:
    try:
        await asked
    except grpc.RpcError as exc:
        return [exc.code().name, exc.details()]
    raise AssertionError("no error")


async def main() -> dict[str, Any]:
    four = np.arange(8, dtype=np.float32).reshape(2, 4)
    async with InferenceGRPCClient(sys.argv[1]) as client:
        ranked = [await rank(client, raw) for raw in (True, False)]
        return {
            "sums": [await sums(client, four, raw) for raw in (True, False)],
            "scores": [one["scores"] for one in ranked],
            "names": [[[str(each, "utf-8") for each in row] for row in one["names"]] for one in ranked],
            "refusals": {
                "datatype": await refusal(ask(client, "sums", given("x", "INT32", four.astype("i4"), False))),
                "axis": await refusal(sums(client, four[:, :3], True)),
            },
        }


json.dump(asyncio.run(main()), sys.stdout)
