"""What Triton serves where payloads are large: the number of octets of each input, at once or after EMULATED_MS of sleep."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]


class TritonPythonModel:
    """Named as Triton's Python backend asks."""

    def initialize(self, args: dict[str, str]) -> None:
        """Called once."""
        self.seconds = float(os.environ.get("EMULATED_MS", "0")) / 1000.0

    def execute(self, requests: list[Any]) -> list[Any]:
        """One answer for each request; Triton has put as many together as there were."""
        if self.seconds:
            time.sleep(self.seconds)
        answers = []
        for request in requests:
            found = triton.get_input_tensor_by_name(request, "octets").as_numpy()
            sizes = np.array([[str(len(one)).encode()] for one in found[:, 0]], dtype=np.object_)
            answers.append(triton.InferenceResponse([triton.Tensor("output", sizes)]))
        return answers
