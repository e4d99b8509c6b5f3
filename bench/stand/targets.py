"""What the benchmarks serve."""

from __future__ import annotations

import os
import random
import time


def upper(inputs: list[str]) -> list[str]:
    """Each text in capitals, at once."""
    return [text.upper() for text in inputs]


class Flaky:
    """Each text in capitals, after a few milliseconds, and not always.

    BENCH_MS is the mean run time, BENCH_RAISE the share of batches of more than one that
    raise. A text that starts with POISON makes its batch raise, every time; one that starts with REJECT fails alone.
    """

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("BENCH_MS", "2")) / 1000.0
        self.raises = float(os.environ.get("BENCH_RAISE", "0"))
        self.rng = random.Random(os.environ.get("BENCH_SEED"))

    def __call__(self, inputs: list[str]) -> list[str | ValueError]:
        time.sleep(self.rng.expovariate(1.0 / self.seconds))
        if any(text.startswith("POISON") for text in inputs):
            raise RuntimeError("a poisonous input")
        if len(inputs) > 1 and self.rng.random() < self.raises:
            raise RuntimeError("a bad moment")
        return [ValueError("rejected") if text.startswith("REJECT") else text.upper() for text in inputs]


class Slow:
    """Each text in capitals: the warm-up at once, every later batch after ten seconds."""

    def __init__(self) -> None:
        self.warm = False

    def __call__(self, inputs: list[str]) -> list[str]:
        if self.warm:
            time.sleep(10.0)
        self.warm = True
        return [text.upper() for text in inputs]


class Neighbours:
    """Each text in capitals, after NEIGHBOURS_MS milliseconds a batch.

    A text that starts with POISON makes its batch raise; REJECT fails alone; BIG is answered with 1 MB.
    """

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("NEIGHBOURS_MS", "20")) / 1000.0

    def __call__(self, inputs: list[str]) -> list[str | ValueError]:
        time.sleep(self.seconds)
        if any(text.startswith("POISON") for text in inputs):
            raise RuntimeError("a poisonous input")
        return [
            ValueError("rejected") if text.startswith("REJECT") else "x" * 1_000_000 if text.startswith("BIG")
            else text.upper() for text in inputs
        ]  # fmt: skip
