"""Messages and services of the gRPC port."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from headway.errors import BadRequest
from headway.protos import FILES, OPEN_INFERENCE, file_of, is_message, message, message_classes

__all__ = [
    "FILES", "HEADWAY", "HEALTH", "OPEN_INFERENCE", "REFLECTION", "REFLECTION_ALPHA", "SERVICES", "Message", "file_of", "is_message", "message",
    "message_classes", "read",
]  # fmt: skip

Message = Any
"""A protobuf message. Type checkers don't know the classes because they are made on import."""

HEADWAY = "headway.v1.Inference"
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"

SERVICES = (HEADWAY, OPEN_INFERENCE, HEALTH, REFLECTION, REFLECTION_ALPHA)
"""Names of all services, in the order of their listing."""


def read(kind: Any, body: bytes) -> Message:
    """Decode a message of a class. Raises BadRequest if the bytes aren't such a message."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise malformed(len(body), kind.DESCRIPTOR.full_name) from None


def malformed(size: int, name: str) -> BadRequest:
    """Return the error for bytes that aren't a message of the class `name`."""
    return BadRequest(f"the message is malformed: {size} bytes that are not a {name}")


def varint(number: int) -> bytes:
    """Encode a number as protobuf does: seven bits a byte, the lowest first."""
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
    return bytes(octets)
