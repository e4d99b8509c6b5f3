"""Models as the Open Inference Protocol shows them, over HTTP and gRPC alike: to principals that may ask them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from headway.core import failures
from headway.errors import Forbidden
from headway.gateway.served_models import ServedModels
from headway.http.oip.infer import check_version
from headway.model import Principal
from headway.oip.metadata import READY, UNAVAILABLE, IndexEntry
from headway.oip.statistics import ModelStatistics, statistics_of
from headway.runtime.counters import Counters


def find_model(served: ServedModels, model: str, version: str | None, principal: Principal) -> str:
    """Name of a model that a principal may ask.

    Arguments:
        served: the served models.
        model: name that was asked for; empty: the default model.
        version: version that was asked for; None: any.
        principal: who asks.

    Raises:
        RequestError: there is no such model or no such version of it, or that is not known now.
        Forbidden: the principal may not ask it, whether it is served or not.
    """
    model = model or served.default_of(principal.models)
    if model and principal.models and model not in principal.models:
        raise Forbidden(failures.no_model_for(model, principal.models).message)
    if model not in served:
        raise failures.error_of(served.absence(model, principal.models))
    check_version(served, model, version)
    return model


def index_of(served: ServedModels, models: Iterable[str], ready: bool, *, only_ready: bool) -> Sequence[IndexEntry]:
    """Repository index of some models: an entry for each version.

    Arguments:
        served: the served models.
        models: names of those that are shown.
        ready: whether this process should get traffic.
        only_ready: whether models without a worker are left out.
    """
    entries = []
    for model in models:
        there = ready and served.has_worker(model)
        state, reason = (READY, "") if there else (UNAVAILABLE, "no worker is ready")
        if model in served.failed:
            reason = "it did not load"
        if there or not only_ready:
            entries += [IndexEntry(model, version, state, reason) for version in served[model].reported]
    return entries


def statistics(served: ServedModels, models: Iterable[str], counters: Counters) -> Sequence[ModelStatistics]:
    """Statistics of some models, of what `counters` have counted."""
    return [
        statistics_of(counters, model, ", ".join(served[model].reported), time.monotonic, time.time) for model in models
    ]
