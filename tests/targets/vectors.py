"""A target of texts that gives lists of numbers, as a model of embeddings does."""

from __future__ import annotations


def vectors(inputs: list[str]) -> list[list[float]]:
    """The length of each text, and a number that float32 holds exactly."""
    return [[float(len(text)), -0.375] for text in inputs]
