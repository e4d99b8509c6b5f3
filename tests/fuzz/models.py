"""Models that the parsers of requests ask, and what holds for each refusal."""

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
    """The model `m`, which takes and gives values of a kind, tensors by specifications; None: nothing is known of it."""
    models = ServedModels(["m"])
    if takes is not None:
        kind, tensors = takes.value, tuple(specs)
        given: dict[str, Any] = {"takes": kind, "gives": kind, "inputs": tensors, "outputs": tensors}
        models.learn([WorkerInfo(worker_id="w", model="m", status=WorkerStatus.HEALTHY, **given)])
    return models


def context_of(settings: Settings, models: ServedModels) -> CodecContext:
    return CodecContext(settings, models, GatewayCounts())


def check_error(exc: RequestError) -> None:
    """Check that the text of an error fits into one answer."""
    assert len(exc.message) < 1000
    exc.message.encode()
