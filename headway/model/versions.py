"""Names of the queues of a model: one for each version, and one for entries that any version may answer."""

from __future__ import annotations


def queue_name(model: str, version: str) -> str:
    """Name of the queue of one version of a model; without a version, of the queue for any."""
    return f"{model}@{version}" if version else model


def model_and_version(queue: str) -> tuple[str, str]:
    """Model and version of a queue's name. The version is empty for the queue for any."""
    model, _, version = queue.partition("@")
    return model, version
