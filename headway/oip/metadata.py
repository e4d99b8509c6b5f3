"""Metadata and statistics of the server and its models, with the protocol's names for JSON and gRPC messages.

Statistics cover the requests of this process. An inference is one input, or one row of tensors. An execution is a batch that ran
successfully. `compute_infer` reports the whole run. `compute_input` and `compute_output` aren't measured: they get the same count, as
Triton's tools require, and zero time.
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
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")
READY, UNAVAILABLE = "READY", "UNAVAILABLE"
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
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
    """Configuration of an input or output. `dims` omits the first axis (rows or elements)."""

    name: str
    data_type: str = "TYPE_STRING"
    dims: tuple[int, ...] = (1,)


class ModelConfig(msgspec.Struct, frozen=True):
    """Configuration of a model, with the members that tools read. `max_batch_size` is the maximum number of rows (or elements) in one
    request. The empty object `dynamic_batching` indicates that rows of many requests are batched."""

    name: str
    max_batch_size: int
    platform: str = SERVER
    backend: str = SERVER
    input: tuple[TensorConfig, ...] = (TensorConfig(INPUT),)
    output: tuple[TensorConfig, ...] = (TensorConfig(OUTPUT),)
    dynamic_batching: dict[str, int] = {}


def tensor_metadata(specs: Sequence[TensorSpec]) -> tuple[TensorMetadata, ...]:
    """Return the metadata of tensors, including the row axis."""
    return tuple(TensorMetadata(spec.name, _shown_datatype(spec), (-1, *spec.shape)) for spec in specs)


def tensor_config(specs: Sequence[TensorSpec]) -> tuple[TensorConfig, ...]:
    """Return the configuration of tensors."""
    return tuple(
        TensorConfig(
            spec.name, "TYPE_STRING" if _shown_datatype(spec) == BYTES else f"TYPE_{spec.datatype}", spec.shape
        )
        for spec in specs
    )


def _shown_datatype(spec: TensorSpec) -> str:
    return BYTES if spec.datatype == JSON else spec.datatype  # The protocol has no JSON datatype.


class IndexEntry(msgspec.Struct, frozen=True):
    """A model in the repository index."""

    name: str
    version: str
    state: str
    reason: str = ""


class Duration(msgspec.Struct, frozen=True):
    """Number of events and their total duration in nanoseconds."""

    count: int = 0
    ns: int = 0


NEVER = Duration()


class InferenceStatistics(msgspec.Struct, frozen=True):
    """Statistics of a model's inferences. `fail` counts errors, including refusals and requests whose clients left. The three
    `compute_…` members count batch runs. `cache_hit` counts answers that reuse the outcome of an identical request, or of one with
    the same idempotency key."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_infer: Duration
    compute_input: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration = NEVER


class BatchStatistics(msgspec.Struct, frozen=True):
    """Statistics of batches of one size."""

    batch_size: int
    compute_infer: Duration
    compute_input: Duration
    compute_output: Duration


class ModelStatistics(msgspec.Struct, frozen=True):
    """Statistics of a model. `last_inference` is the Unix time of the last answer in milliseconds, or 0 if there was none.
    `inference_count` is the number of successful inputs (or rows of tensors), and `execution_count` the number of batches."""

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
    """Return a model's statistics. `clock` returns the monotonic time, and `wall_clock` the Unix time, both in seconds."""
    outcomes = {"ok": 0, "failed": 0}
    for (name, _, outcome), count in counters.requests.items():
        if name == model:
            outcomes["ok" if outcome == "ok" else "failed"] += count
    seconds = sum(histogram.sum for (name, _), histogram in counters.request_seconds.items() if name == model)
    failed_seconds = counters.failed_seconds.get(model, 0.0)
    waits = [histogram for (name, _), histogram in counters.queue_seconds.items() if name == model]
    shared = sum(count for (name, _, _), count in counters.shared.items() if name == model)
    runs = sorted((size, run) for (name, size), run in counters.runs.items() if name == model)
    last = counters.last_answer.get(model)
    run_count, run_seconds = sum(run.count for _, run in runs), sum(run.seconds for _, run in runs)
    return ModelStatistics(
        name=model,
        version=version,
        last_inference=0 if last is None else int((wall_clock() - (clock() - last)) * 1000),
        inference_count=max(outcomes["ok"] - shared, 0) + counters.more_rows.get(model, 0),
        execution_count=run_count,
        inference_stats=InferenceStatistics(
            success=_duration(outcomes["ok"], seconds - failed_seconds),
            fail=_duration(outcomes["failed"], failed_seconds),
            queue=_duration(sum(wait.count for wait in waits), sum(wait.sum for wait in waits)),
            compute_infer=_duration(run_count, run_seconds),
            compute_input=Duration(run_count),
            compute_output=Duration(run_count),
            cache_hit=_duration(shared, 0.0),
        ),
        batch_stats=tuple(
            BatchStatistics(size, _duration(run.count, run.seconds), Duration(run.count), Duration(run.count))
            for size, run in runs
        ),
    )


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, round(max(seconds, 0.0) * NANOSECONDS))
