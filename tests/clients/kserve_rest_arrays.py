"""What KServe's REST client asks of a server of arrays; its argument is the server's address."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from httpx import HTTPStatusError  # type: ignore[import-not-found]
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig  # type: ignore[import-not-found]

URL = f"http://{sys.argv[1]}"


def given(name: str, datatype: str, array: Any, binary: bool) -> InferInput:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


async def ask(client: InferenceRESTClient, model: str, output: bool, *inputs: InferInput) -> Any:
    request = InferRequest(model, list(inputs), request_id="7", parameters={"binary_data_output": output})
    return await client.infer(URL, request, model_name=model)


async def sums(client: InferenceRESTClient, array: Any, binary: bool, output: bool) -> list[Any]:
    answer = await ask(client, "sums", output, given("x", "FP32", array, binary))
    found = answer.outputs[0].as_numpy()
    return [found.tolist(), list(found.shape), answer.id]


async def rank(client: InferenceRESTClient, binary: bool, output: bool) -> dict[str, Any]:
    answer = await ask(
        client,
        "ranker",
        output,
        given("query", "FP32", np.array([[1, 2]], np.float32), binary),
        given("ids", "INT64", np.array([[3, 4]]), binary),
    )
    return {one.name: one.as_numpy().tolist() for one in answer.outputs}


async def refusal(asked: Any) -> list[Any]:
    try:
        await asked
    except HTTPStatusError as exc:
        return [exc.response.status_code, str(exc)]
    raise AssertionError("no error")


async def main() -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    four = np.arange(8, dtype=np.float32).reshape(2, 4)
    ways = [(binary, output) for binary in (True, False) for output in (True, False)]
    return {
        "sums": [await sums(client, four, *way) for way in ways],
        "ranked": [await rank(client, *way) for way in ways],
        "refusals": {
            "datatype": await refusal(ask(client, "sums", True, given("x", "INT32", four.astype("i4"), True))),
            "axis": await refusal(sums(client, four[:, :3], True, True)),
        },
    }


json.dump(asyncio.run(main()), sys.stdout)
