from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np


class Sums:
    """Sums rows of four numbers. Negative numbers fail while the file `obstacle` exists. 99 at the start gives NaN."""

    example = np.zeros(4, np.float32)

    def __init__(self, obstacle: str = "obstacle") -> None:
        self.obstacle = Path(obstacle)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if (x < 0).any() and self.obstacle.exists():
            raise ValueError("a negative number")
        with np.errstate(divide="ignore"):
            return np.where(x[:, :1] == 99, np.nan, x.sum(axis=1, keepdims=True))


class Ranked:
    """Scores ids for a query."""

    inputs: ClassVar = {"query": ("FP32", [2]), "ids": ("INT64", [-1])}
    outputs: ClassVar = {"scores": ("FP64", [-1]), "best": ("INT64", [])}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
        scores = inputs["ids"] * inputs["query"].sum(axis=1, keepdims=True)
        return {"scores": scores, "best": inputs["ids"].max(axis=1)}


class Padded(Ranked):
    """The same, with padded ids."""

    pad = 0


class Image:
    """Returns the mean of each image. Its example is too long to be shown."""

    inputs: ClassVar = {"image": ("UINT8", [64, 64, 3])}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"mean": inputs["image"].mean(axis=(1, 2, 3))}


class Kept:
    """Returns the mean of each row, and the first number of the previous batch, read from a view that it kept."""

    inputs: ClassVar = {"x": ("FP32", [-1])}
    kept: np.ndarray | None = None

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        before = np.zeros(1, np.float32) if self.kept is None else self.kept[0, :1]
        self.kept = inputs["x"]
        return {"mean": inputs["x"].mean(axis=1), "before": np.repeat(before, len(inputs["x"]))}


class Same:
    inputs: ClassVar = {"x": ("FP32", [-1])}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return inputs


class Cuts:
    """Returns rows without their first number. They are ragged."""

    example: ClassVar = np.zeros(3, np.float32)

    def __call__(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        return [row[1:] for row in rows]


class Forges:
    """Sends answers that aren't tensors, as user code could."""

    inputs: ClassVar = {"x": ("FP32", [1])}
    content = b""

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        from headway.backends.process import arrays

        if inputs["x"][0, 0]:
            arrays.packed = lambda *_, **__: [self.content]  # type: ignore[attr-defined]
        return inputs
