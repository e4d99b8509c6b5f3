"""The function that peers serve, the same as ours.

BENCH_TARGET is MODULE:NAME of a function or class, such as `bench.stand.targets:Padded`. If it is empty, strings are upper-cased, after
BENCH_BATCH_MS a batch.
"""

import importlib
import os
import time
from collections.abc import Callable
from typing import Any


def made() -> Callable[[list[Any]], list[Any]]:
    """Return the function, which maps inputs to JSON-compatible outputs."""
    name = os.environ.get("BENCH_TARGET", "")
    if not name:
        return _upper(float(os.environ.get("BENCH_BATCH_MS", "0")) / 1000.0)
    module, _, attribute = name.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, type):
        target = target()
    if hasattr(target, "setup"):
        target.setup("cpu")

    def run(inputs: list[Any]) -> list[Any]:
        outputs = target(inputs)
        return outputs if isinstance(outputs, list) else list(outputs.tolist())

    return run


def _upper(seconds: float) -> Callable[[list[Any]], list[Any]]:
    def run(inputs: list[Any]) -> list[Any]:
        if seconds:
            time.sleep(seconds)
        return [text.upper() for text in inputs]

    return run
