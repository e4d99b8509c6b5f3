"""Metadata of the server and of its models, and their statistics, with the protocol's names, as JSON and the gRPC messages both have them.

Statistics are of what went through this process: each input, or row of tensors, counts as one inference, and each batch from which an
answer came as one execution. A run is told as `compute_infer`; what comes before and after it on a GPU is not measured apart, so
`compute_input` and `compute_output` have the same count and no time. Triton's tools refuse counts that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from headway.core.tensors import BYTES, JSON
from headway.model import TensorSpec
from headway.oip.tensors import INPUT, OUTPUT
from headway.runtime.counters import GatewayCounts
from headway.version import __version__

SERVER = "headway"
"""Name of the server, of its platform and of its backend."""

EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")
"""Extensions of the protocol that work here."""

READY, UNAVAILABLE = "READY", "UNAVAILABLE"
"""States of a model in the repository index."""


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Whole number, such as a size in a shape: of 64 bits, as in the protocol's messages."""

NANOSECONDS = 1e9


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


class Duration(msgspec.Struct, frozen=True):
    """Number of events, and their durations in nanoseconds, added up."""

    count: int = 0
    ns: int = 0


NEVER = Duration()


class InferenceStatistics(msgspec.Struct, frozen=True):
    """Statistics of a model's inferences.

    Attributes:
        success: answers with an output.
        fail: answers with an error, refusals among them, and requests whose clients left.
        queue: waits in the queue.
        compute_infer, compute_input, compute_output: runs of batches.
        cache_hit: answers with the outcome of an identical request, or of one under the same key.
    """

    success: Duration
    fail: Duration
    queue: Duration
    compute_infer: Duration
    compute_input: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration = NEVER


class BatchStatistics(msgspec.Struct, frozen=True):
    """Statistics of the batches of one size."""

    batch_size: int
    compute_infer: Duration
    compute_input: Duration
    compute_output: Duration


class ModelStatistics(msgspec.Struct, frozen=True):
    """Statistics of a model.

    Attributes:
        last_inference: instant of the last answer, in milliseconds since 1970; 0 for none.
        inference_count: inputs that ran and got an output; of tensors their rows.
        execution_count: batches that ran.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: tuple[BatchStatistics, ...]


def statistics_of(
    counters: GatewayCounts, model: str, version: str, clock: Callable[[], float], wall_clock: Callable[[], float]
) -> ModelStatistics:
    """Statistics of a model.

    Arguments:
        counters: counters of the process, or of one tenant in it.
        model: name of the model.
        version: version of the model.
        clock: monotonic seconds, as the counters have them.
        wall_clock: seconds since 1970.
    """
    outcomes = {"ok": 0, "failed": 0}
    for (name, _, outcome), count in counters.requests.items():
        if name == model:
            outcomes["ok" if outcome == "ok" else "failed"] += count
    seconds = sum(one.sum for (name, _), one in counters.request_seconds.items() if name == model)
    failed_seconds = counters.failed_seconds.get(model, 0.0)
    waits = [one for (name, _), one in counters.queue_seconds.items() if name == model]
    shared = sum(count for (name, _, _), count in counters.shared.items() if name == model)
    runs = sorted((size, run) for (name, size), run in counters.runs.items() if name == model)
    last = counters.last_answer.get(model)
    run_count, run_seconds = sum(run.count for _, run in runs), sum(run.seconds for _, run in runs)
    return ModelStatistics(
        model,
        version,
        0 if last is None else int((wall_clock() - (clock() - last)) * 1000),
        max(outcomes["ok"] - shared, 0) + counters.more_rows.get(model, 0),
        run_count,
        InferenceStatistics(
            success=_duration(outcomes["ok"], seconds - failed_seconds),
            fail=_duration(outcomes["failed"], failed_seconds),
            queue=_duration(sum(one.count for one in waits), sum(one.sum for one in waits)),
            compute_infer=_duration(run_count, run_seconds),
            compute_input=Duration(run_count),
            compute_output=Duration(run_count),
            cache_hit=_duration(shared, 0.0),
        ),
        tuple(
            BatchStatistics(size, _duration(run.count, run.seconds), Duration(run.count), Duration(run.count))
            for size, run in runs
        ),
    )


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, round(max(seconds, 0.0) * NANOSECONDS))
