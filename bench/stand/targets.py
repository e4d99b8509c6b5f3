"""Targets that the benchmarks serve."""

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar


def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


class Slow:
    """Upper-cases strings. Takes ten seconds, except for the warm-up."""

    def __init__(self) -> None:
        self.warm = False

    def __call__(self, inputs: list[str]) -> list[str]:
        if self.warm:
            time.sleep(10.0)
        self.warm = True
        return [text.upper() for text in inputs]


class Neighbours:
    """Upper-cases strings, in NEIGHBOURS_MS a batch.

    POISON makes its batch raise; REJECT fails alone; the answer to BIG has 1 MB, to HUGE 8.
    """

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("NEIGHBOURS_MS", "20")) / 1000.0

    def __call__(self, inputs: list[str]) -> list[str | ValueError]:
        time.sleep(self.seconds)
        if any(text.startswith("POISON") for text in inputs):
            raise RuntimeError("a poisonous input")
        return [
            ValueError("rejected") if text.startswith("REJECT") else "x" * 1_000_000 if text.startswith("BIG")
            else "x" * 8_000_000 if text.startswith("HUGE") else text.upper() for text in inputs
        ]  # fmt: skip


class PaddedNeighbours(Neighbours):
    """Like Neighbours, for a model that pads. A batch of eight inputs of NEIGHBOURS_LENGTH takes NEIGHBOURS_MS, two fifths of it fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 0.4 * self.seconds
        self.beta = 0.6 * self.seconds / 8 / float(os.environ["NEIGHBOURS_LENGTH"])

    def __call__(self, inputs: list[str]) -> list[str | ValueError]:
        self.seconds = self.alpha + self.beta * len(inputs) * max(map(len, inputs))
        return super().__call__(inputs)


class NeighboursTogether:
    """Like Neighbours, with a parameter that must be equal within a call."""

    together = ("temperature",)

    def __init__(self) -> None:
        self.neighbours = Neighbours()

    def __call__(self, inputs: list[str], parameters: Mapping[str, object]) -> list[str | ValueError]:
        return self.neighbours(inputs)


class Padded:
    """Upper-cases strings in α + β · number · longest: BENCH_ALPHA_MS, and BENCH_BETA_US for each octet."""

    def __init__(self) -> None:
        self.alpha = float(os.environ["BENCH_ALPHA_MS"]) / 1000.0
        self.beta = float(os.environ["BENCH_BETA_US"]) / 1e6

    def __call__(self, inputs: list[str]) -> list[str]:
        time.sleep(self.alpha + self.beta * len(inputs) * max(map(len, inputs)))
        return [text.upper() for text in inputs]


class Measure:
    """Returns the number of octets of each input, after EMULATED_MS."""

    example = b"example"

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("EMULATED_MS", "100")) / 1000.0

    def __call__(self, inputs: list[bytes]) -> list[str]:
        time.sleep(self.seconds)
        return [str(len(octets)) for octets in inputs]


class Grow:
    """Returns as many octets as each input says, after EMULATED_MS."""

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


class Letters:
    """Returns the number of non-empty strings in each row."""

    inputs: ClassVar = {"x": ("BYTES", [-1])}
    outputs: ClassVar = {"output": ("FP32", [1])}

    def __call__(self, inputs: Any) -> Any:
        return {"output": (inputs["x"] != "").sum(axis=1, keepdims=True).astype("f4")}


class Ends:
    """Returns the first and last number of each row of an array with one datatype and row shape."""

    outputs: ClassVar = {"output": ("FP32", [2])}

    def __init__(self, datatype: str, *row: int) -> None:
        self.inputs = {"x": (datatype, row)}

    def __call__(self, inputs: Any) -> Any:
        rows = inputs["x"]
        return {"output": rows.reshape(len(rows), -1)[:, [0, -1]].astype("f4")}
