"""What is served where payloads are large: a GPU made of sleep, with octets in or out."""

from __future__ import annotations

import os
import time


class Measure:
    """The number of octets of each input, after EMULATED_MS milliseconds."""

    example = b"example"

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("EMULATED_MS", "100")) / 1000.0

    def __call__(self, inputs: list[bytes]) -> list[str]:
        time.sleep(self.seconds)
        return [str(len(one)) for one in inputs]


class Grow:
    """As many octets as each input says, after EMULATED_MS milliseconds."""

    example = "7"

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("EMULATED_MS", "100")) / 1000.0
        self.made = b""

    def __call__(self, inputs: list[str]) -> list[bytes]:
        time.sleep(self.seconds)
        sizes = [int(text) for text in inputs]
        if len(self.made) < max(sizes):
            self.made = os.urandom(max(sizes))
        return [self.made if size == len(self.made) else self.made[:size] for size in sizes]
