"""Messages and services of the gRPC port."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from headway.errors import BadRequest
from headway.protos import FILES, OPEN_INFERENCE, file_of, is_message, message, message_classes

__all__ = [
    "FILES",
    "HEADWAY",
    "HEALTH",
    "OPEN_INFERENCE",
    "REFLECTION",
    "REFLECTION_ALPHA",
    "SERVICES",
    "Message",
    "file_of",
    "is_message",
    "message_classes",
    "message",
    "read",
]

Message = Any
"""Message of one of the files. Their classes are made when the module is imported, so that no type checker knows them."""

HEADWAY = "headway.v1.Inference"
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"

SERVICES = (HEADWAY, OPEN_INFERENCE, HEALTH, REFLECTION, REFLECTION_ALPHA)
"""Names of all services, in the order in which they are listed."""


def read(kind: Any, body: bytes) -> Message:
    """Message of a class in the bytes that a client sent.

    Raises:
        BadRequest: the bytes are no such message.
    """
    try:
        return kind.FromString(body)
    except DecodeError:
        raise malformed(len(body), kind.DESCRIPTOR.full_name) from None


def malformed(size: int, name: str) -> BadRequest:
    """Error of bytes that are no message of a kind."""
    return BadRequest(f"the message is malformed: {size} bytes that are no {name}")


def varint(number: int) -> bytes:
    """Number as protobuf writes it, seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
