"""Functions that Triton serves for comparison with Headway, instantly or after EMULATED_MS of sleep, one for each model of triton_server.py."""

import json
import os
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]


def upper(tensors: list[Any]) -> list[Any]:
    return [np.array([[text.decode().upper().encode()] for text in texts[:, 0]], dtype=np.object_) for texts in tensors]


def ends(tensors: list[Any]) -> list[Any]:
    """Return the first and last number of each row, read from one array of all rows, which is how a model wants its batch."""
    rows = np.concatenate(tensors)
    answers = rows.reshape(len(rows), -1)[:, [0, -1]].astype(np.float32)
    return np.split(answers, np.cumsum([len(rows) for rows in tensors])[:-1])


class TritonPythonModel:
    """The backend requires this name."""

    def initialize(self, args: dict[str, str]) -> None:
        self.seconds = float(os.environ.get("EMULATED_MS", "0")) / 1000.0
        self.run = upper if args["model_name"] == "upper" else ends
        self.name = json.loads(args["model_config"])["input"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests that Triton has batched."""
        if self.seconds:
            time.sleep(self.seconds)
        tensors = [triton.get_input_tensor_by_name(request, self.name).as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("output", output)]) for output in self.run(tensors)]
