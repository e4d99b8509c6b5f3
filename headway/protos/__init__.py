"""Messages and services of gRPC, in a descriptor pool of their own; the extra `grpc` brings what they need.

All generated code registers its descriptors in one pool of the process, under names that may be there only once. A target
that runs in this process, or a program that embeds Headway, may import other code for the same protocols, such as
tritonclient's. So nothing here goes into that pool.

The descriptors are those of the files beside this one; `make protos` compiles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory


def _load() -> tuple[Any, Mapping[str, bytes]]:
    """Pool of the descriptors, and each file's descriptor as it is sent to those who ask for it, by name."""
    pool = descriptor_pool.DescriptorPool()
    compiled = Path(__file__).with_name("descriptors.json").read_text("utf-8")
    found = json_format.Parse(compiled, descriptor_pb2.FileDescriptorSet())
    files = {file.name: file.SerializeToString() for file in found.file}
    for file in files.values():
        pool.AddSerializedFile(file)
    return pool, files


_POOL, FILES = _load()

OPEN_INFERENCE = "inference.GRPCInferenceService"
"""Service of the Open Inference Protocol."""


def message(name: str) -> Any:
    """Class of a message by its full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def kinds_of(service: str, method: str) -> tuple[Any, Any]:
    """Classes of a method's requests and answers."""
    found = _POOL.FindServiceByName(service).methods_by_name[method]
    return message_factory.GetMessageClass(found.input_type), message_factory.GetMessageClass(found.output_type)


def is_message(name: str) -> bool:
    """Whether a full name is that of a message."""
    try:
        _POOL.FindMessageTypeByName(name)
    except KeyError:
        return False
    return True


def file_of(symbol: str) -> str | None:
    """Name of the file that has a symbol; None where none has it."""
    try:
        return str(_POOL.FindFileContainingSymbol(symbol).name)
    except KeyError:
        pass
    try:  # The pool looks for methods apart.
        return str(_POOL.FindMethodByName(symbol).containing_service.file.name)
    except KeyError:
        return None
