"""Names of the queues of a model: one for each version, one for entries that any version may answer, and those of each zone."""

from __future__ import annotations


def queue_name(model: str, version: str) -> str:
    """Name of the queue of one version of a model; without a version, of the queue for any."""
    return f"{model}@{version}" if version else model


def in_zone(queue: str, zone: str) -> str:
    """Name of a queue in one zone, inside the broker. The queue of those without a zone has the name alone."""
    return f"{queue}+{zone}" if zone else queue


def name_and_zone(queue: str) -> tuple[str, str]:
    """Name of a queue without its zone, and the zone; see `in_zone`."""
    name, _, zone = queue.partition("+")
    return name, zone


def model_and_version(queue: str) -> tuple[str, str]:
    """Model and version of a queue's name, in whatever zone. The version is empty for the queue for any."""
    model, _, version = queue.partition("+")[0].partition("@")
    return model, version
