"""What KServe's gRPC client asks of a server of texts; its arguments are the port's address, a good key, and one over its limit."""

import asyncio
import json
import sys
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest  # type: ignore[import-not-found]

ADDRESS, KEY, SLOW = sys.argv[1:]


def headers(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


async def infer(
    client: InferenceGRPCClient, *texts: str, model: str = "default", key: str = KEY, **options: Any
) -> list[Any]:
    tensor = InferInput("INPUT", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=object))
    answer = await client.infer(InferRequest(model, [tensor], request_id="7"), headers=headers(key), **options)
    return [[one.decode() for one in answer.outputs[0].as_numpy().tolist()], answer.id]


async def refusal(asked: Any) -> list[Any]:
    try:
        await asked
    except grpc.RpcError as exc:
        trailers = dict(exc.trailing_metadata() or ())
        return [exc.code().name, exc.details(), trailers.get("grpc-retry-pushback-ms")]
    raise AssertionError("no error")


async def twice(client: InferenceGRPCClient) -> None:
    for _ in range(2):
        await infer(client, "a", key=SLOW)


async def main() -> dict[str, Any]:
    async with InferenceGRPCClient(ADDRESS) as client:
        return {
            "health": [
                await client.is_server_live(),
                await client.is_server_ready(),
                await client.is_model_ready("default", headers=headers(KEY)),
            ],
            "answer": await infer(client, "one", "zwölf"),
            "refusals": {
                "no key": await refusal(infer(client, "a", key="wrong")),
                "other model": await refusal(infer(client, "a", model="other")),
                "element": await refusal(infer(client, "good", "bad")),
                "fault": await refusal(infer(client, "fault")),
                "rate": await refusal(twice(client)),
                "too large": await refusal(infer(client, "x" * 2_000_000)),
                "too late": await refusal(infer(client, "slow", timeout=0.05)),
            },
        }


json.dump(asyncio.run(main()), sys.stdout)
