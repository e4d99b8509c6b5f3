"""Models as the Open Inference Protocol shows them, over HTTP and gRPC alike: to principals that may ask them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from headway.core import failures
from headway.errors import Forbidden
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.gateway import Gateway
from headway.http.oip.infer import check_version
from headway.model import Principal, ValueKind
from headway.oip.metadata import (
    READY,
    UNAVAILABLE,
    IndexEntry,
    ModelConfig,
    ModelMetadata,
    configured,
    described,
)
from headway.oip.statistics import ModelStatistics, statistics_of


class ShownModels:
    """Models of a gateway, as they are shown at one of its ports.

    Arguments:
        gateway: the gateway.
        anonymous: whether nobody is asked for a credential: then statistics are of the process, else of the principal's tenant.
        ready: tells whether this process should get traffic.
    """

    def __init__(self, gateway: Gateway, anonymous: bool, ready: Callable[[], Awaitable[bool]]) -> None:
        self._gateway, self._served = gateway, gateway.served
        self._anonymous, self.ready = anonymous, ready
        self._most = min(MOST_INPUTS, gateway.settings.max_queue)

    def find(self, model: str, version: str | None, principal: Principal) -> str:
        """Name of a model that a principal may ask.

        Arguments:
            model: name that was asked for; empty: the default model.
            version: version that was asked for; None: any.
            principal: who asks.

        Raises:
            RequestError: there is no such model or no such version of it, or that is not known now.
            Forbidden: the principal may not ask it, whether it is served or not.
        """
        served = self._served
        model = model or served.default_of(principal.models)
        if model and principal.models and model not in principal.models:
            raise Forbidden(failures.no_model_for(model, principal.models).message)
        if model not in served:
            raise failures.error_of(served.absence(model, principal.models))
        check_version(served, model, version)
        return model

    async def is_ready(self, model: str) -> bool:
        """Whether a model answers requests now."""
        return await self.ready() and self._served.has_worker(model)

    def metadata(self, model: str) -> ModelMetadata:
        """Metadata of a model."""
        served = self._served[model]
        told = ModelMetadata(model, served.reported)
        if served.takes is ValueKind.TENSORS:
            told = replace(told, inputs=described(served.inputs))
        return replace(told, outputs=described(served.outputs)) if served.gives is ValueKind.TENSORS else told

    def config(self, model: str) -> ModelConfig:
        """Configuration of a model."""
        served = self._served[model]
        told = ModelConfig(model, self._most)
        if served.takes is ValueKind.TENSORS:
            told = replace(told, input=configured(served.inputs), max_batch_size=served.settings.max_batch_size)
        return replace(told, output=configured(served.outputs)) if served.gives is ValueKind.TENSORS else told

    def statistics(self, principal: Principal, model: str = "") -> Sequence[ModelStatistics]:
        """Statistics of a model; empty: of each that the principal may ask."""
        gateway, served = self._gateway, self._served
        counters = gateway.counters if self._anonymous else gateway.tenant_counts.of(principal.tenant)
        return [
            statistics_of(counters, one, ", ".join(served[one].reported), time.monotonic, time.time)
            for one in ([model] if model else served.visible(principal.models))
        ]

    async def index(self, principal: Principal, *, only_ready: bool) -> Sequence[IndexEntry]:
        """Repository index: an entry for each version of each model that the principal may ask.

        Arguments:
            principal: who asks.
            only_ready: whether models without a worker are left out.
        """
        served, ready, entries = self._served, await self.ready(), list[IndexEntry]()
        for model in served.visible(principal.models):
            there = ready and served.has_worker(model)
            state, reason = (READY, "") if there else (UNAVAILABLE, "no worker is ready")
            if model in served.failed:
                reason = "it did not load"
            if there or not only_ready:
                entries += [IndexEntry(model, version, state, reason) for version in served[model].reported]
        return entries
