"""Models for the parsers of requests, and a check that every refusal must pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.config import Settings
from headway.doors.exchange import CodecContext
from headway.errors import RequestError
from headway.gateway.served_models import ServedModels
from headway.model import TensorSpec, ValueKind, WorkerInfo, WorkerStatus
from headway.runtime.counters import GatewayCounts


def models_of(takes: ValueKind | None = None, specs: Sequence[TensorSpec] = ()) -> ServedModels:
    """Return a model `m` that takes and gives this kind of value, with these tensor specs. With None, both are unknown."""
    models = ServedModels(["m"])
    if takes is not None:
        kind, tensors = takes.value, tuple(specs)
        given: dict[str, Any] = {"takes": kind, "gives": kind, "inputs": tensors, "outputs": tensors}
        models.learn([WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, **given)])
    return models


def context_of(settings: Settings, models: ServedModels) -> CodecContext:
    return CodecContext(settings, models, GatewayCounts())


def check_error(exc: RequestError) -> None:
    """Check that an error message fits into an answer."""
    assert len(exc.message) < 1000
    exc.message.encode()
