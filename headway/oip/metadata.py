"""Metadata of the server and of its models, with the protocol's names, as JSON and the gRPC messages both have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from headway import __version__
from headway.core.tensors import BYTES, JSON
from headway.model import TensorSpec
from headway.oip.tensors import INPUT, OUTPUT

SERVER = "headway"
"""Name of the server, of its platform and of its backend."""

EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")
"""Extensions of the protocol that work here."""

READY, UNAVAILABLE = "READY", "UNAVAILABLE"
"""States of a model in the repository index."""


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Whole number, such as a size in a shape: of 64 bits, as in the protocol's messages."""


class ServerMetadata(msgspec.Struct, frozen=True):
    """Metadata of the server."""

    name: str = SERVER
    version: str = __version__
    extensions: tuple[str, ...] = EXTENSIONS


class TensorMetadata(msgspec.Struct, frozen=True):
    """Metadata of an input or output. A dimension of -1 may have any size."""

    name: str
    datatype: str = BYTES
    shape: tuple[Int64, ...] = (-1, 1)


class ModelMetadata(msgspec.Struct, frozen=True):
    """Metadata of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str = SERVER
    inputs: tuple[TensorMetadata, ...] = (TensorMetadata(INPUT),)
    outputs: tuple[TensorMetadata, ...] = (TensorMetadata(OUTPUT),)


class TensorConfig(msgspec.Struct, frozen=True):
    """Configuration of an input or output. The dimensions leave out that of the rows, or elements, of one request."""

    name: str
    data_type: str = "TYPE_STRING"
    dims: tuple[int, ...] = (1,)


class ModelConfig(msgspec.Struct, frozen=True):
    """Configuration of a model, as far as the protocol's tools look at it.

    Attributes:
        max_batch_size: most rows, or elements, of one request. The batches that run are made of those of many requests.
        dynamic_batching: an empty object, whose presence says that requests are batched.
    """

    name: str
    max_batch_size: int
    platform: str = SERVER
    backend: str = SERVER
    input: tuple[TensorConfig, ...] = (TensorConfig(INPUT),)
    output: tuple[TensorConfig, ...] = (TensorConfig(OUTPUT),)
    dynamic_batching: dict[str, int] = {}


def described(specs: Sequence[TensorSpec]) -> tuple[TensorMetadata, ...]:
    """Metadata of tensors of these specifications, with the axis of the rows."""
    return tuple(TensorMetadata(one.name, _told(one), (-1, *one.shape)) for one in specs)


def configured(specs: Sequence[TensorSpec]) -> tuple[TensorConfig, ...]:
    """Configuration of tensors of these specifications."""
    return tuple(TensorConfig(one.name, _TYPES.get(_told(one)) or f"TYPE_{one.datatype}", one.shape) for one in specs)


_TYPES = {BYTES: "TYPE_STRING"}
"""Datatypes that a configuration names otherwise."""


def _told(spec: TensorSpec) -> str:
    """Datatype as clients are told it."""
    return BYTES if spec.datatype == JSON else spec.datatype


class IndexEntry(msgspec.Struct, frozen=True):
    """Model in the repository index."""

    name: str
    version: str
    state: str
    reason: str = ""
