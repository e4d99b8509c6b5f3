"""Targets whose inputs and outputs are no texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar


class Scores:
    """Answers with the sum of its numbers, and how large their batch was."""

    example: ClassVar[dict[str, Any]] = {"numbers": [1, 2]}

    def __call__(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any] | Exception]:
        return [self._answer(one) for one in inputs]

    def _answer(self, one: Any) -> Any:
        if not isinstance(one, dict):
            return TypeError(f"expected an object, got {type(one).__name__}")
        if "unless" in one and Path(one["unless"]).exists():
            raise RuntimeError("in the way")
        if one.get("nan"):
            return {"sum": math.nan}
        return {"sum": sum(one.get("numbers", [])), "of": one}


class NoExample:
    """Has no example, so that nothing is known to work."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if any(one == "kill" for one in inputs):
            raise RuntimeError("told to")
        return inputs


def embed(inputs: list[str]) -> list[list[float]]:
    return [[len(text) / 2, 0.25] for text in inputs]


def reverse(inputs: list[bytes]) -> list[bytes]:
    return [octets[::-1] for octets in inputs]
