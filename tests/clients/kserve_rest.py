"""What KServe's REST client asks of a server of texts; its arguments are the server's address and a good key."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from httpx import HTTPStatusError  # type: ignore[import-not-found]
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig  # type: ignore[import-not-found]

ADDRESS, KEY, SLOW = sys.argv[1:]
URL = f"http://{ADDRESS}"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def infer(
    client: InferenceRESTClient, binary: bool, output: bool, *texts: str, model: str = "default", key: str = KEY
) -> list[Any]:
    tensor = InferInput("INPUT", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=object), binary_data=binary)
    request = InferRequest(model, [tensor], request_id="7", parameters={"binary_data_output": output})
    answer = await client.infer(URL, request, model_name=model, headers={"Authorization": f"Bearer {key}"})
    return [answer.outputs[0].as_numpy().tolist(), answer.id]


async def refusal(asked: Any) -> list[Any]:
    try:
        await asked
    except HTTPStatusError as exc:
        return [exc.response.status_code, str(exc)]
    raise AssertionError("no error")


async def twice(client: InferenceRESTClient) -> None:
    for _ in range(2):
        await infer(client, True, True, "a", key=SLOW)


async def main() -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    return {
        "health": [
            await client.is_server_live(URL),
            await client.is_server_ready(URL),
            await client.is_model_ready(URL, "default", headers=HEADERS),
        ],
        "answers": [
            await infer(client, binary, output, "one", "zwölf") for binary in (True, False) for output in (True, False)
        ],
        "refusals": {
            "no input": await refusal(client.infer(URL, {"inputs": []}, model_name="default", headers=dict(HEADERS))),
            "no key": await refusal(infer(client, True, True, "a", key="wrong")),
            "other model": await refusal(infer(client, True, True, "a", model="other")),
            "element": await refusal(infer(client, True, True, "good", "bad")),
            "fault": await refusal(infer(client, True, True, "fault")),
            "rate": await refusal(twice(client)),
            "too large": await refusal(infer(client, True, True, "x" * 2_000_000)),
        },
    }


json.dump(asyncio.run(main()), sys.stdout)
