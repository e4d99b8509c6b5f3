"""Kinds of values that the served models take and give, as their workers report them.

A gateway may know a model before any worker of it has started. Until then every value is let in, and the worker judges:
an input that it cannot take fails alone.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headway import errors
from headway.config import Settings
from headway.core import failures
from headway.core.health import OFFLINE_AFTER
from headway.core.values import name_of
from headway.model import Entry, Failure, Octets, Value, ValueKind, WorkerInfo, WorkerStatus
from headway.ports import Registry
from headway.runtime.periodic import Periodic
from headway.runtime.resource import PeriodicResource

READ_WORKERS_EVERY = 0.5
"""Seconds between two looks at the workers."""

_LARGEST = (ValueKind.JSON, ValueKind.BYTES, ValueKind.TEXT)
"""Kinds by what counts while the workers of one model differ, as they do while a fleet changes to another target."""

_ON_DEMAND = (WorkerStatus.COLD, WorkerStatus.STARTING)
"""Statuses of a model on a GPU that holds several, in which a request for it waits until it is loaded."""


class KnownKinds(Protocol):
    """Facts of the models that readers of requests go by; ModelKinds describes each."""

    @property
    def default(self) -> str:
        """Name of the model of requests that name none; empty where there is none."""

    @property
    def refusal(self) -> Callable[[str, str], Failure | None]:
        """Failure of a request for a version of a model; None where it is not known to be wrong."""

    def __contains__(self, model: object) -> bool: ...

    def seen_by(self, only: Collection[str]) -> KnownKinds:
        """See ModelKinds."""

    def versions(self, model: str) -> tuple[str, ...]:
        """See ModelKinds."""

    def takes(self, model: str) -> ValueKind | None:
        """See ModelKinds."""

    def gives(self, model: str) -> ValueKind | None:
        """See ModelKinds."""

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        """See ModelKinds."""


class ModelKinds:
    """Served models: their names and versions, and the kinds of their values.

    Arguments:
        models: names of the models that are served.
        settings: settings of the default model, and of the models' versions.

    Attributes:
        models: names of the models, in order.
        default: name of that model; empty: there is none.
        unchecked: models of which any text will do, so that a request with one needs no further look.
        failed: models that did not load on any GPU, with the seconds until one tries again at the soonest.
        in_doubt: whether other models and versions may be served, too, of which this process has not heard.
        refusal: refusal of a request for a version that no healthy worker runs, by model and version; None where it is let in.
    """

    def __init__(self, models: Iterable[str], settings: Settings | None = None) -> None:
        self._models = frozenset(models)
        self.models = sorted(self._models)
        self._wanted = settings.default if settings is not None else ""
        served = settings.served if settings is not None else {}
        self._configured = {name: (one.model_version,) for name, one in served.items()}
        self._versions: dict[str, tuple[str, ...]] = dict(self._configured)
        self.default = self._chosen()
        self._served = self._models
        self._known: dict[str, tuple[ValueKind, ValueKind]] = {}
        self._examples: dict[str, str] = {}
        self.unchecked = set(self._models)
        self.failed: dict[str, float] = {}
        self._loads: Mapping[str, float] = {}
        """Seconds until each model that is not loaded anywhere would be, as far as GPUs tell."""
        self.in_doubt: Callable[[], bool] = lambda: False
        self.refusal: Callable[[str, str], Failure | None] = lambda model, version: failures.no_version(
            model, version, self.versions(model)
        )

    def __contains__(self, model: object) -> bool:
        return model in self._models

    def learn(self, workers: Iterable[WorkerInfo]) -> None:
        """Take note of what workers take and give. A model without a healthy worker keeps what was known of it."""
        found: dict[str, list[WorkerInfo]] = {}
        workers = list(workers)
        self.failed, self._loads = _failed(workers), _loads(workers)
        for worker in workers:
            if worker.status is WorkerStatus.HEALTHY and worker.model in self._models:
                found.setdefault(worker.model, []).append(worker)
        for model, those in found.items():
            takes = _largest(worker.takes for worker in those)
            self._known[model] = takes, _largest(worker.gives for worker in those)
            self._examples[model] = next((worker.example for worker in those if worker.example), "")
            (self.unchecked.discard if takes is ValueKind.BYTES else self.unchecked.add)(model)
            versions = tuple(sorted({worker.runs.version for worker in those if worker.runs.version}))
            self._versions[model] = versions or self._versions.get(model, ())
        self._served = frozenset(found) | _loadable(workers)

    def serve(self, models: Iterable[str]) -> None:
        """Serve these models from now on, and no others."""
        before, self._models = self._models, frozenset(models)
        self.models = sorted(self._models)
        self.default = self._chosen()
        self.unchecked.update(self._models - before)
        for gone in before - self._models:
            self.unchecked.discard(gone)
            self._known.pop(gone, None)
            self._examples.pop(gone, None)
            self._versions.pop(gone, None)

    def has_worker(self, model: str) -> bool:
        """Whether a healthy worker of a model was there at the last look, or a GPU that loads it when it is asked for.

        Not looked at where there is one model.
        """
        return len(self.models) == 1 or model in self._served

    def not_loaded(self, entry: Entry) -> Failure | None:
        """Failure of an entry whose model did not load, if no GPU tries again in the time that the entry may wait.

        One with dedup keys goes to the broker: its answer may be kept.
        """
        rest = self.failed.get(entry.model, 0.0)
        waits = bool(entry.dedup_keys) or rest <= min(entry.timeout, entry.queue_timeout)
        return None if waits else failures.not_loaded(entry.model, rest)

    def in_time(self, model: str, failure: Failure) -> Failure:
        """Failure of a request for a model that no worker came up for, to be sent again once that is loaded, as far as is known."""
        rest = self._loads.get(model)
        if rest is None or failure.code != errors.NO_WORKERS or failure.retry_after is None:
            return failure
        return msgspec.structs.replace(failure, retry_after=max(rest, failure.retry_after))

    def absence(self, model: str, only: Collection[str] = ()) -> Failure:
        """Failure of a request for a model that is not among them, as far as is known now; see `check`."""
        if self.in_doubt():
            return failures.model_unknown(model)
        there = self.visible(only)
        if not model:
            return failures.no_default(there)
        return failures.no_model(model, [one if one in self._served else f"{one} (no worker)" for one in there])

    def visible(self, only: Collection[str]) -> list[str]:
        """Names of the models that a principal may ask. `only`: the only ones of its credential; empty: all."""
        return [model for model in self.models if model in only] if only else self.models

    def default_of(self, only: Collection[str]) -> str:
        """Model that a principal means who names none; empty where there is none, or it may not ask it. `only`: see `visible`."""
        return self.default if not only or self.default in only else ""

    def seen_by(self, only: Collection[str]) -> KnownKinds:
        """Models as a credential may know them that may ask `only` some, empty for all. Others are as if they did not exist."""
        return _Seen(self, only) if only else self

    def versions(self, model: str) -> tuple[str, ...]:
        """Versions of a model that workers run or, before there is one, that is to be run; empty for an unknown model."""
        return self._versions.get(model, self._configured.get(model, ()))

    def _chosen(self) -> str:
        if self._wanted in self._models:
            return self._wanted
        return self.models[0] if len(self.models) == 1 else ""

    def takes(self, model: str) -> ValueKind | None:
        """ValueKind of a model's inputs; None while it is not known."""
        known = self._known.get(model)
        return None if known is None else known[0]

    def gives(self, model: str) -> ValueKind | None:
        """ValueKind of a model's outputs; None while it is not known."""
        known = self._known.get(model)
        return None if known is None else known[1]

    def example(self, model: str) -> Any:
        """JSON value of the example of a model's target; None where it has none, or that is not known."""
        text = self._examples.get(model, "")
        return msgspec.json.decode(text) if text else None

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        """Failure of a request for a model that is not among the unchecked; None when the model takes its input.

        Arguments:
            model: name of the model; empty where the request names none and there is no default.
            input: value for the model.
            only: see `visible`.
        """
        if model not in self._models:
            return self.absence(model, only)
        if self.takes(model) is not ValueKind.BYTES or isinstance(input, Octets):
            return None
        try:
            if isinstance(input, str):
                base64.b64decode(input, validate=True)
                return None
        except (binascii.Error, ValueError):
            pass
        found = "other text" if isinstance(input, str) else f"`{name_of(input)}`"
        return Failure(errors.BAD_REQUEST, f"Expected text in base64, as the model takes octets; got {found}")


def _failed(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """Models that did not load and have no worker that could serve them, with the seconds until one is tried again."""
    rests: dict[str, float] = {}
    others = set()
    for worker in workers:
        if worker.status is WorkerStatus.FAILED:
            rests[worker.model] = min(rests.get(worker.model, worker.retry_in), worker.retry_in)
        elif worker.status is not WorkerStatus.OFFLINE:
            others.add(worker.model)
    return {model: rest for model, rest in rests.items() if model not in others}


def _loads(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """Models that are loaded nowhere, with the least seconds that are left of a load, or that a new one takes, where GPUs tell it."""
    rests: dict[str, float] = {}
    warm = set()
    for worker in workers:
        if worker.status in (WorkerStatus.HEALTHY, WorkerStatus.DEGRADED):
            warm.add(worker.model)
        elif worker.status in _ON_DEMAND and worker.load_seconds:
            rest = max(worker.load_seconds - worker.loading, 0.0)
            rests[worker.model] = min(rests.get(worker.model, rest), rest)
    return {model: rest for model, rest in rests.items() if model not in warm}


def _loadable(workers: Sequence[WorkerInfo]) -> set[str]:
    """Models that a GPU which holds several loads when they are asked for, or loads now, as far as it is heard of."""
    newest = max((worker.last_heartbeat for worker in workers), default=0.0)
    return {
        worker.model
        for worker in workers
        if worker.gpu and worker.status in _ON_DEMAND and newest - worker.last_heartbeat < OFFLINE_AFTER
    }


def _largest(named: Iterable[str]) -> ValueKind:
    """ValueKind that counts of those that workers name. A worker of a release that names none takes and gives text."""
    there = set(named)
    return next((kind for kind in _LARGEST if kind.value in there), ValueKind.TEXT)


class Learner(Protocol):
    """Whatever goes by the reports of workers."""

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""
        ...


class KindsWatcher(PeriodicResource):
    """Watcher of the workers, for what a gateway knows of its models and their weights; see `headway.app.lifecycle.Resource`.

    Arguments:
        kinds: kinds that are kept up to date.
        registry: broker that knows the workers.
        clock: monotonic seconds.
        before: learner that is told first, as it may change which models are served.
        after: learners that are told then.
        every: returns the seconds until the next look.
    """

    def __init__(
        self,
        kinds: ModelKinds,
        registry: Registry,
        clock: Callable[[], float],
        before: Learner | None = None,
        after: Iterable[Learner] = (),
        every: Callable[[], float] = lambda: READ_WORKERS_EVERY,
    ) -> None:
        self._learners: list[Learner] = [*([] if before is None else [before]), kinds, *after]
        self._registry = registry
        super().__init__(Periodic("kinds of models", self.look, clock, every=every))

    async def look(self) -> None:
        """Look at the workers once."""
        self.learn(await self._registry.workers())

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what workers report."""
        for learner in self._learners:
            learner.learn(workers)


class _Seen:
    """The models as a credential sees them that may ask `only` some."""

    def __init__(self, kinds: ModelKinds, only: Collection[str]) -> None:
        self._kinds, self._only = kinds, only

    @property
    def default(self) -> str:
        return self._kinds.default_of(self._only)

    @property
    def refusal(self) -> Callable[[str, str], Failure | None]:
        return self._kinds.refusal

    def seen_by(self, only: Collection[str]) -> KnownKinds:
        return _Seen(self._kinds, only) if only else self._kinds

    def __contains__(self, model: object) -> bool:
        return model in self._only and model in self._kinds

    def versions(self, model: str) -> tuple[str, ...]:
        return self._kinds.versions(model) if model in self else ()

    def takes(self, model: str) -> ValueKind | None:
        return self._kinds.takes(model) if model in self else None

    def gives(self, model: str) -> ValueKind | None:
        return self._kinds.gives(model) if model in self else None

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        return self._kinds.check(model, input, only) if model in self else None
