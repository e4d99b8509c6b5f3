"""Targets of arrays that give back what they get."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tests.clients.array_targets import DATATYPES

_DATATYPES = tuple(name for name in DATATYPES if name != "BF16")


class Passed:
    """One array of each datatype, of rows of any length."""

    inputs: ClassVar = {f"in_{name}": (name, [-1]) for name in _DATATYPES}
    outputs: ClassVar = {f"out_{name}": (name, [-1]) for name in _DATATYPES}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name.replace("in_", "out_"): one for name, one in inputs.items()}


class Halved:
    """Rows of four numbers, each halved. One that holds 13 is refused, and NaN is given back."""

    example = np.zeros(4, np.float32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if (x == 13).any():
            raise ValueError("thirteen")
        return x[:, :2] / 2
