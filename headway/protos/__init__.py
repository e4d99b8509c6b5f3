"""gRPC messages and services, in a descriptor pool of their own. Needs the extra `grpc`.

Generated protobuf code registers its descriptors in one pool per process, where a name may exist only once. A target in
this process, or a program that embeds Headway, may import other code for the same protocols (tritonclient's, for example),
so nothing here goes into that pool.

`make protos` compiles the .proto files beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory


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

OPEN_INFERENCE = "inference.GRPCInferenceService"


def message(name: str) -> Any:
    """Return the class of a message, by its full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def message_classes(service: str, method: str) -> tuple[Any, Any]:
    """Return the classes of a method's requests and answers."""
    rpc = _POOL.FindServiceByName(service).methods_by_name[method]
    return message_factory.GetMessageClass(rpc.input_type), message_factory.GetMessageClass(rpc.output_type)


def is_message(name: str) -> bool:
    """Return True if a message has this full name."""
    try:
        _POOL.FindMessageTypeByName(name)
    except KeyError:
        return False
    return True


def file_of(symbol: str) -> str | None:
    """Return the name of the file that defines a symbol, or None."""
    try:
        return str(_POOL.FindFileContainingSymbol(symbol).name)
    except KeyError:
        pass
    try:  # The pool knows a method's file only through its service.
        return str(_POOL.FindMethodByName(symbol).containing_service.file.name)
    except KeyError:
        return None
