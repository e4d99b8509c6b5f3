"""A target of texts that gives lists of numbers, as a model of embeddings does."""

from __future__ import annotations


def vectors(inputs: list[str]) -> list[list[float]]:
    """The length of each text, and a number that float32 holds exactly."""
    return [[float(len(text)), -0.375] for text in inputs]


def numbers(inputs):  # type: ignore[no-untyped-def]
    """Sums of lists of numbers, whose kind the example alone tells."""
    return [sum(numbers) for numbers in inputs]


numbers.example = [1.0, 2.0]  # type: ignore[attr-defined]
