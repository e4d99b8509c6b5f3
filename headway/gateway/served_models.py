"""The models that a gateway serves, and what a client may see of them.

A gateway may know a model before any of its workers has started. Until then, the gateway lets in every input, and a worker later
fails those that it can't accept."""

from __future__ import annotations

import base64
import binascii
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from headway import errors
from headway.config import Settings
from headway.core import failures
from headway.core.deadlines import HELD_SHARE
from headway.core.health import OFFLINE_AFTER
from headway.core.tensor_json import tensors_of
from headway.core.tensors import NoTensors, check_heads, header_of
from headway.core.values import name_of
from headway.core.versions import Weights
from headway.gateway.request_traces import RequestTraces
from headway.gateway.served_model import ServedModel, VersionChoice
from headway.model import Entry, Failure, Octets, Scaling, Tensors, Value, ValueKind, WorkerInfo, WorkerStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)

_CHECKED = (ValueKind.BYTES, ValueKind.TENSORS)  # Input kinds for which not every text is valid.
_WARM = (WorkerStatus.HEALTHY, WorkerStatus.DEGRADED)
_ON_DEMAND = (WorkerStatus.COLD, WorkerStatus.STARTING)  # A shared GPU is loading the model, or will on request.


class ServedModels(dict[str, ServedModel]):
    """Served models by name. All other names map to `unserved`, whose requests are refused.

    Attributes:
        in_doubt: returns True if there may be models and versions that this process doesn't know yet.
        models: names of the models, sorted.
        default: model for requests that don't name one; empty if there is no default.
        unchecked: models that accept any text, so their inputs needn't be checked.
        at_zero: models that have no workers because there was no demand, with the seconds that starting one would take.
        failed: models that failed to load on every GPU, with the seconds until the next try.
        failing: models whose workers are all starting after a failure, with the seconds until the next try.
        unready: models that are at zero or failed.
    """

    def __init__(
        self,
        models: Iterable[str],
        settings: Settings | None = None,
        rng: Callable[[], float] = random.random,
        clock: Callable[[], float] = monotonic,
        traces: RequestTraces | None = None,
        in_doubt: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        settings = settings or Settings()
        alone = not settings.models
        self._rng, self._clock = rng, clock
        self._wanted, self._configured = settings.default, settings.served
        self.traces, self.in_doubt = traces, in_doubt
        self._weights: Mapping[str, Weights] | None = None  # Version weights that override the settings.
        self._absent: dict[
            str, Sequence[str]
        ] = {}  # Versions that have a weight but no worker, by model, as last logged.
        self._ready: Collection[str] = ()  # Models that have a healthy worker, or that a GPU loads on request.
        self.failed: dict[str, float] = {}
        self.failing: Mapping[str, float] = {}
        self.at_zero: Mapping[str, float] = {}
        self.unready: Collection[str] = ()
        self._scalings: Mapping[str, Scaling] = {}  # Scaling of each model that may be at zero.
        self._warm: Collection[str] = ()  # Models that had a warm worker at the last check.
        self._loads: Mapping[str, float] = {}  # Seconds until a GPU could have loaded each model that none has.
        self.unserved = ServedModel(settings, rng, alone=alone, traces=traces, clock=clock)
        for model in models:
            self._add(model, self._configured.get(model, settings), alone=alone)
        self.unchecked = set(self)
        self._ready = frozenset(self)
        self._note_names()

    def __missing__(self, model: str) -> ServedModel:
        return self.unserved

    def serve(self, served: Mapping[str, Settings]) -> None:
        """From now on serve these models and no others."""
        for gone in self.keys() - served.keys():
            del self[gone]
            self.unchecked.discard(gone)
            self._absent.pop(gone, None)
        self.unchecked.update(served.keys() - self.keys())
        for model, settings in served.items():
            former = self.get(model)
            if former is None or former.settings is not settings:
                self._add(model, settings, alone=False)
                if former is not None:
                    self[model].follow(former)
        self._note_names()

    def learn(self, workers: Iterable[WorkerInfo]) -> None:
        workers = list(workers)
        of_each = defaultdict[str, list[WorkerInfo]](list)
        for worker in workers:
            of_each[worker.model].append(worker)
        self.failed, self._loads, self.failing = _failed(workers), _loads(workers), _failing(workers)
        for model, served in self.items():
            served.learn(of_each[model])
            (self.unchecked.discard if served.takes in _CHECKED else self.unchecked.add)(model)
            self._warn_of_absent(model, served.versions)
        healthy = {worker.model for worker in workers if worker.status is WorkerStatus.HEALTHY}
        self._ready = (healthy & self.keys()) | _loadable(workers)
        self._warm = {worker.model for worker in workers if worker.status in _WARM}
        self.note_starts(self._scalings)

    def note_starts(self, scalings: Mapping[str, Scaling]) -> bool:
        """Update which models are at zero. `scalings` has the scaling of each model that may be at zero. Returns True if any changed."""
        before, self._scalings = self.at_zero.keys(), scalings
        at_zero = (model for model in scalings if model not in self._warm and model in self)
        self.at_zero = {model: max(scalings[model].starts_in or 0.0, self.failing.get(model, 0.0)) for model in at_zero}
        self.unready = self.at_zero.keys() | self.failed.keys()
        for model in before | self.at_zero.keys():
            settings = self[model].settings
            # At zero, a request may wait for a worker to start until its deadline.
            wait = settings.request_timeout_ms if model in self.at_zero else settings.queue_timeout_ms
            self[model].queue_timeout = wait / 1000
        return before != self.at_zero.keys()

    def has_worker(self, model: str) -> bool:
        """Return True if a model has a healthy worker, will be loaded or started on request, or is the only model."""
        return len(self.models) == 1 or model in self._ready or (model in self.at_zero and model not in self.failing)

    def not_loaded(self, entry: Entry) -> Failure | None:
        """Return the failure for an entry whose model failed to load and won't be retried in time; None if the entry may wait.
        Entries with dedup keys may always wait, because the broker may have an answer for them."""
        seconds = self.failed.get(entry.model, 0.0)
        waits = bool(entry.dedup_keys) or seconds <= min(entry.timeout, entry.queue_timeout)
        return None if waits else failures.not_loaded(entry.model, seconds)

    def not_started(self, entry: Entry) -> Failure | None:
        """Return the failure for an entry whose model is at zero and won't start in time; see `not_loaded`."""
        seconds = self.at_zero.get(entry.model, 0.0)
        waits = bool(entry.dedup_keys) or seconds <= HELD_SHARE * entry.timeout
        return None if waits else self._no_worker(entry.model, seconds)

    def still_at_zero(self, entry: Entry) -> Failure | None:
        """Return the failure for an entry whose deadline has passed if its model is at zero, otherwise None."""
        seconds = self.at_zero.get(entry.model)
        return None if seconds is None else self._no_worker(entry.model, max(seconds, 1.0))

    def _no_worker(self, model: str, seconds: float) -> Failure:
        if model in self.failing:
            return failures.not_loaded(model, seconds)
        scaling = self._scalings[model]
        return failures.at_zero(model, seconds, scaling.awaited if scaling.late else 0.0)

    @property
    def awaited(self) -> Mapping[str, Scaling]:
        """Scaling of each model that is at zero but has demand."""
        return {model: self._scalings[model] for model in self.at_zero if self._scalings[model].desired}

    @property
    def wakes(self) -> bool:
        """True if any model at zero may be able to start."""
        return any(model not in self.failing for model in self.at_zero)

    def in_time(self, model: str, failure: Failure) -> Failure:
        """Increase the Retry-After of a NO_WORKERS failure to the expected time until the model is loaded."""
        seconds = self._loads.get(model, self.at_zero.get(model))
        if seconds is None or failure.code != errors.NO_WORKERS or failure.retry_after is None:
            return failure
        return msgspec.structs.replace(failure, retry_after=max(seconds, failure.retry_after))

    def absence(self, model: str, only: Collection[str] = ()) -> Failure:
        """Return the failure for a request for a model that isn't served. `only`: see `visible`."""
        if self.in_doubt():
            return failures.model_unknown(model)
        names = self.visible(only)
        if not model:
            return failures.no_default(names) if names or not only else failures.none_served_for(only)
        return failures.no_model(model, [name if name in self._ready else f"{name} (no worker)" for name in names])

    def visible(self, only: Collection[str]) -> list[str]:
        """Return the names of the models that a credential may use. `only`: the models it is restricted to; empty for all."""
        return [model for model in self.models if model in only] if only else self.models

    def default_of(self, only: Collection[str]) -> str:
        """Return the default model for a credential; empty if there is none. `only`: see `visible`."""
        return self.default if not only or self.default in only else ""

    def seen_by(self, only: Collection[str]) -> KnownModels:
        """Return a view of the models that a credential may use. `only`: see `visible`."""
        return SeenModels(self, only) if only else self

    def refusal(self, model: str, version: str) -> Failure | None:
        """Return the failure for a request for a version that no healthy worker runs; None while the model is at zero."""
        return None if model in self.at_zero else self[model].versions.refusal(model, version, self.in_doubt())

    def example(self, model: str) -> Any:
        """Return the example of a model's target as a JSON value; None if there is none, or while unknown."""
        text = self[model].example
        return msgspec.json.decode(text) if text else None

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        """Return a failure if a model that isn't in `unchecked` can't accept an input. `only`: see `visible`."""
        if model not in self:
            return self.absence(model, only)
        takes = self[model].takes
        if takes is ValueKind.TENSORS:
            return _wrong_tensors(self[model], input)
        if takes is not ValueKind.BYTES or isinstance(input, Octets):
            return None
        try:
            if isinstance(input, str):
                base64.b64decode(input, validate=True)
                return None
        except (binascii.Error, ValueError):
            pass
        shown = "other text" if isinstance(input, str) else f"`{name_of(input)}`"
        return Failure(errors.BAD_REQUEST, f"Expected text in base64, because the model takes bytes; got {shown}")

    def weigh(self, weights: Mapping[str, Weights]) -> None:
        """Set the version weights by model. The weights under "" apply to all other models."""
        self._weights = weights
        for model in self:
            self._set_weights(model)

    def _add(self, model: str, settings: Settings, *, alone: bool) -> None:
        served = self[model] = ServedModel(settings, self._rng, alone=alone, traces=self.traces, clock=self._clock)
        if model in self._configured:
            served.reported = (self._configured[model].model_version,)
        self._set_weights(model)

    def _note_names(self) -> None:
        self.models = sorted(self)
        self.default = self._wanted if self._wanted in self else self.models[0] if len(self.models) == 1 else ""

    def _set_weights(self, model: str) -> None:
        if self._weights is not None:
            self[model].versions.weigh(self._weights.get(model, self._weights[""]))

    def _warn_of_absent(self, model: str, choice: VersionChoice) -> None:
        """Log the model's versions that have a weight but no worker, whenever these change."""
        versions = choice.absent
        if versions != self._absent.get(model, ()):
            self._absent[model] = versions
            if versions:
                until_then = "requests that do not name a version wait for a worker"
                if len(versions) < sum(map(bool, choice.weights.values())):
                    until_then = "other versions answer their requests"
                hint = f"Start workers for them, or change --version-weights. Until then, {until_then}."
                event, names = "versions of a model have a weight but no worker", ",".join(versions)
                log.warning(event, model=model, versions=names, hint=hint)


class SeenModels:
    """View of ServedModels for a credential that may use only some of the models."""

    def __init__(self, served: ServedModels, only: Collection[str]) -> None:
        self._served, self._only = served, only
        self.refusal = served.refusal

    @property
    def default(self) -> str:
        return self._served.default_of(self._only)

    def __contains__(self, model: object) -> bool:
        return model in self._only and model in self._served

    def __getitem__(self, model: str) -> ServedModel:
        return self._served[model] if model in self._only else self._served.unserved

    def seen_by(self, only: Collection[str]) -> KnownModels:
        return self._served.seen_by(only)

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        return self._served.check(model, input, only) if model in self else None


KnownModels = ServedModels | SeenModels  # Models as seen by code that reads requests.


def _wrong_tensors(served: ServedModel, input: Value) -> Failure | None:
    """Return a failure unless the input consists of tensors that the model accepts, or of JSON for such tensors."""
    try:
        tensors = input if isinstance(input, Tensors) else tensors_of(input, served.inputs)
        header = header_of(tensors)
        check_heads(header.heads, served.inputs)
    except NoTensors as exc:
        return Failure(errors.BAD_REQUEST, str(exc))
    most = served.settings.max_batch_size
    if header.rows > most:
        message = f"the input has {header.rows} rows; at most {most} are allowed in one request (max_batch_size). Send them in several requests"
        return Failure(errors.PAYLOAD_TOO_LARGE, message)
    return None


def _failed(workers: Sequence[WorkerInfo]) -> dict[str, float]:
    """For each model that all its workers have failed to load, return the seconds until the next attempt."""
    gone = WorkerStatus.FAILED, WorkerStatus.OFFLINE
    others = {worker.model for worker in workers if worker.status not in gone}
    failed = (worker for worker in workers if worker.status is WorkerStatus.FAILED)
    return _soonest((worker.model, worker.retry_in) for worker in failed if worker.model not in others)


def _failing(workers: Iterable[WorkerInfo]) -> Mapping[str, float]:
    """For each model whose workers are all starting after a failure, return the seconds until the next attempt."""
    workers = [worker for worker in workers if worker.status is not WorkerStatus.OFFLINE]
    others = {worker.model for worker in workers if worker.status is not WorkerStatus.STARTING}
    failing = {worker.model for worker in workers if worker.start_failed} - others
    return _soonest((worker.model, worker.retry_in) for worker in workers if worker.model in failing)


def _loads(workers: Sequence[WorkerInfo]) -> dict[str, float]:
    """Return, for each model that isn't loaded on any GPU, the seconds until one could have loaded it. Omits models without a
    load time."""
    warm = {worker.model for worker in workers if worker.status in _WARM}
    absent = (worker for worker in workers if worker.status in _ON_DEMAND and worker.model not in warm)
    return _soonest(
        (worker.model, worker.retry_in + max(worker.load_seconds - worker.loading, 0.0))
        for worker in absent
        if worker.load_seconds
    )


def _soonest(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    soonest: dict[str, float] = {}
    for model, seconds in times:
        soonest[model] = min(seconds, soonest.get(model, seconds))
    return soonest


def _loadable(workers: Sequence[WorkerInfo]) -> set[str]:
    """Return the models that a live GPU is loading or loads on request."""
    newest = max((worker.last_heartbeat for worker in workers), default=0.0)
    return {
        worker.model
        for worker in workers
        if worker.gpu and worker.status in _ON_DEMAND and newest - worker.last_heartbeat < OFFLINE_AFTER
    }
