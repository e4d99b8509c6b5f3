"""gRPC messages and services. Requires the extra `grpc`. `make protos` compiles the .proto files next to this one.

The messages have their own descriptor pool. In the process-wide pool, names must be unique, and a target or a program that
embeds Headway may import other generated code for the same protocols (tritonclient's, for example).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from headway.errors import BadRequest

HEADWAY = "headway.v1.Inference"
OPEN_INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
SERVICES = (HEADWAY, OPEN_INFERENCE, HEALTH, REFLECTION, REFLECTION_ALPHA)  # In listing order.

Message = Any  # A protobuf message. Type checkers don't know its class, because it is created at import time.


def _load() -> tuple[Any, Mapping[str, bytes]]:
    """Return the descriptor pool, and the serialized descriptor of each file by name (for reflection)."""
    pool = descriptor_pool.DescriptorPool()
    compiled = Path(__file__).with_name("descriptors.json").read_text("utf-8")
    descriptors = json_format.Parse(compiled, descriptor_pb2.FileDescriptorSet())
    files = {file.name: file.SerializeToString() for file in descriptors.file}
    for file in files.values():
        pool.AddSerializedFile(file)
    return pool, files


_POOL, FILES = _load()


def message(name: str) -> Any:
    """Return the message class with this full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def message_classes(service: str, method: str) -> tuple[Any, Any]:
    """Return the classes of a method's requests and answers."""
    rpc = _POOL.FindServiceByName(service).methods_by_name[method]
    return message_factory.GetMessageClass(rpc.input_type), message_factory.GetMessageClass(rpc.output_type)


def is_message(name: str) -> bool:
    """Return True if there is a message with this full name."""
    try:
        _POOL.FindMessageTypeByName(name)
    except KeyError:
        return False
    return True


def file_of(symbol: str) -> str | None:
    """Return the name of the .proto file that defines a symbol, or None."""
    try:
        return str(_POOL.FindFileContainingSymbol(symbol).name)
    except KeyError:
        pass
    try:  # The pool knows a method's file only through its service.
        return str(_POOL.FindMethodByName(symbol).containing_service.file.name)
    except KeyError:
        return None


def read(kind: Any, body: bytes) -> Message:
    """Decode a message of the given class. Raises BadRequest if the bytes aren't such a message."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise malformed(len(body), kind.DESCRIPTOR.full_name) from None


def malformed(size: int, name: str) -> BadRequest:
    """Return the error for bytes that aren't a message of the class `name`."""
    return BadRequest(f"the message is malformed: {size} bytes that are not a {name}")


def varint(number: int) -> bytes:
    """Encode a number as protobuf does: seven bits per byte, lowest first."""
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
    return bytes(octets)
