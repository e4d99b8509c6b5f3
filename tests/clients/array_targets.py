"""Targets that take or return arrays: of numbers, of every datatype, and embeddings."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES",
)  # fmt: skip


class Sums:
    """The sum of each row of four numbers, three times: as it is, doubled and squared."""

    inputs: ClassVar = {"x": ("FP32", [4])}
    outputs: ClassVar = {"sums": ("FP32", [3])}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        total = x.sum(axis=1, keepdims=True)
        return np.concatenate([total, 2 * total, total**2], axis=1)


class Same:
    """Echoes arrays of every datatype."""

    inputs: ClassVar = {f"in_{name}": (name, [2, -1]) for name in DATATYPES}
    outputs: ClassVar = {f"out_{name}": (name, [2, -1]) for name in DATATYPES}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name.replace("in_", "out_"): array for name, array in inputs.items()}


class Ranker:
    """The scores of ids for a query, and their names."""

    inputs: ClassVar = {"query": ("FP32", [2]), "ids": ("INT64", [-1])}
    outputs: ClassVar = {"scores": ("FP32", [-1]), "names": ("BYTES", [-1])}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        ids = inputs["ids"]
        return {
            "scores": (ids + inputs["query"].sum(axis=1, keepdims=True)).astype(np.float32),
            "names": np.array([[f"id {number}" for number in row] for row in ids.tolist()], dtype=object),
        }


def embed(texts: list[str]) -> np.ndarray:
    return np.array([[len(text), 0.5] for text in texts], dtype=np.float32)


class Columns:
    """Turns the columns of a table, each a separate input, into one score for each row."""

    inputs: ClassVar = {"age": ("INT64", [1]), "height": ("FP64", [1])}
    outputs: ClassVar = {"score": ("FP64", [1])}

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"score": inputs["age"] * inputs["height"]}
