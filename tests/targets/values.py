from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar


class Scores:
    """Takes objects instead of strings. Answers with the sum of `numbers`, and the input."""

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
