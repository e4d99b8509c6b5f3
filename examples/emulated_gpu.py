"""A GPU made of sleep, for trying Headway and for load tests without one.

    headway serve examples/emulated_gpu.py:EmulatedGPU

A batch of n takes α + β·n milliseconds whatever is in it, and costs no processor time. The rules of a real one
are enforced: a list of 1 to 100 strings, one batch at a time. Set by the environment:

    EMULATED_MS        α, 100 by default
    EMULATED_BETA_MS   β, 0 by default
    EMULATED_MAX       largest batch, 100 by default
"""

from __future__ import annotations

import os
import threading
import time


class EmulatedGPU:
    """Answers each text in capitals."""

    def __init__(self) -> None:
        self.alpha = float(os.environ.get("EMULATED_MS", "100")) / 1000.0
        self.beta = float(os.environ.get("EMULATED_BETA_MS", "0")) / 1000.0
        self.largest = int(os.environ.get("EMULATED_MAX", "100"))
        self._running = threading.Lock()

    def __call__(self, inputs: list[str]) -> list[str]:
        if type(inputs) is not list or not all(type(text) is str for text in inputs):
            raise TypeError("a batch is a list of strings")
        if not 1 <= len(inputs) <= self.largest:
            raise ValueError(f"a batch of {len(inputs)}; this GPU takes 1 to {self.largest}")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("a second batch while one is running")
        try:
            time.sleep(self.alpha + self.beta * len(inputs))
            return [text.upper() for text in inputs]
        finally:
            self._running.release()
