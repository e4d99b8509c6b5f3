"""What KServe's REST client asks of a server of texts; its arguments are the server's address and a good key."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from httpx import HTTPStatusError  # type: ignore[import-not-found]
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig  # type: ignore[import-not-found]

ADDRESS, KEY = sys.argv[1:]
URL = f"http://{ADDRESS}"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def infer(client: InferenceRESTClient, binary: bool, output: bool, **options: Any) -> list[Any]:
    """Texts of the answer, and its id."""
    tensor = InferInput("INPUT", [2], "BYTES")
    tensor.set_data_from_numpy(np.array(["one", "zwölf"], dtype=object), binary_data=binary)
    request = InferRequest("default", [tensor], request_id="7", parameters={"binary_data_output": output})
    answer = await client.infer(URL, request, model_name="default", headers=dict(HEADERS), **options)
    return [answer.outputs[0].as_numpy().tolist(), answer.id]


async def main() -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    try:
        await client.infer(URL, {"inputs": []}, model_name="default", headers=dict(HEADERS))
        refusal = ""
    except HTTPStatusError as exc:
        refusal = str(exc)
    return {
        "health": [
            await client.is_server_live(URL),
            await client.is_server_ready(URL),
            await client.is_model_ready(URL, "default", headers=HEADERS),
        ],
        "answers": [await infer(client, binary, output) for binary in (True, False) for output in (True, False)],
        "refusal": refusal,
    }


json.dump(asyncio.run(main()), sys.stdout)
