"""What Triton serves beside Headway: each text in capitals, at once or after EMULATED_MS of sleep."""

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
            texts = triton.get_input_tensor_by_name(request, "text").as_numpy()
            capitals = np.array([[text.decode().upper().encode()] for text in texts[:, 0]], dtype=np.object_)
            answers.append(triton.InferenceResponse([triton.Tensor("output", capitals)]))
        return answers
