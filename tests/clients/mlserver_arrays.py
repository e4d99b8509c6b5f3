"""How MLServer's codecs encode arrays, DataFrames and strings, and decode a server's answers. Arguments: the address and a good key."""

import json
import sys
import urllib.request
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from mlserver.codecs import NumpyCodec, NumpyRequestCodec, PandasCodec, StringCodec  # type: ignore[import-not-found]
from mlserver.types import InferenceRequest, InferenceResponse  # type: ignore[import-not-found]


def ask(model: str, request: InferenceRequest) -> InferenceResponse:
    body = request.model_dump_json(exclude_none=True).encode()
    url = f"http://{sys.argv[1]}/v2/models/{model}/infer"
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"authorization": f"Bearer {sys.argv[2]}"})
    ) as answer:
        return InferenceResponse.model_validate_json(answer.read())


def arrays(answer: InferenceResponse) -> dict[str, Any]:
    return {one.name: NumpyCodec.decode_output(one).tolist() for one in answer.outputs if one.datatype != "BYTES"}


FOUR = np.arange(8, dtype=np.float32).reshape(2, 4)
ranked = InferenceRequest(
    inputs=[
        NumpyCodec.encode_input("query", np.array([[1, 2]], np.float32)),
        NumpyCodec.encode_input("ids", np.array([[3, 4]])),
    ]
)
answer = ask("ranker", ranked)
json.dump(
    {
        "request": NumpyRequestCodec.decode_response(ask("sums", NumpyRequestCodec.encode_request(FOUR))).tolist(),
        "ranked": arrays(answer),
        "names": StringCodec.decode_output(answer.outputs[1]),
        "frame": PandasCodec.decode_response(
            ask("columns", PandasCodec.encode_request(pd.DataFrame({"age": [30, 41], "height": [1.5, 2.0]})))
        ).to_dict("list"),
        "embeddings": arrays(ask("embed", InferenceRequest(inputs=[StringCodec.encode_input("TEXT", ["a", "bcd"])]))),
    },
    sys.stdout,
)
