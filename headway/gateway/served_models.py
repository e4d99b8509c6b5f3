"""Models that a gateway serves: which there are, and what is told of each to those that may ask it.

A gateway may know a model before any worker of it has started. Until then every value is let in, and the worker judges:
an input that it cannot take fails alone.
"""

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
from headway.gateway.served_model import ServedModel
from headway.gateway.version_choice import VersionChoice
from headway.model import Entry, Failure, Octets, Scaling, Tensors, Value, ValueKind, WorkerInfo, WorkerStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)

_CHECKED = (ValueKind.BYTES, ValueKind.TENSORS)
"""Kinds of inputs that not any text is one of."""

_WARM = (WorkerStatus.HEALTHY, WorkerStatus.DEGRADED)
_ON_DEMAND = (WorkerStatus.COLD, WorkerStatus.STARTING)
"""Statuses of a model on a GPU that holds several, in which a request for it waits until it is loaded."""


class ServedModels(dict[str, ServedModel]):
    """Served models by their names; a model that is not served is `unserved`.

    Arguments:
        models: names of the models at first.
        settings: settings of the process; None: those by default.
        rng: uniform in [0, 1), by which versions are drawn.
        clock: monotonic seconds.
        traces: traces of the requests; None where none are recorded.
        in_doubt: whether other models and versions may be served, too, of which this process has not heard.

    Attributes:
        unserved: what requests for any other model go by, which are refused.
        models: names of the models, in order.
        default: name of the model of requests that name none; empty: there is none.
        unchecked: models of which any text will do, so that a request with one needs no further look.
        at_zero: models without a worker, as nobody asked for them, with the seconds until one serves that is started now.
        unready: models of either kind, at zero or failed.
        failed: models that did not load on any GPU, with the seconds until one tries again at the soonest.
        failing: models whose workers all start, of which one has failed to, with the seconds until the next try.
        traces, in_doubt: see the arguments.
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
        self._weights: Mapping[str, Weights] | None = None
        """Weights that are in force instead of those of the settings."""
        self._absent: dict[str, Sequence[str]] = {}
        """Versions of each model that have a weight and no worker, as the log has them."""
        self._ready: Collection[str] = ()
        """Models that had a healthy worker at the last look, or a GPU that loads them when they are asked for."""
        self.failed: dict[str, float] = {}
        self.failing: Mapping[str, float] = {}
        self.at_zero: Mapping[str, float] = {}
        self.unready: Collection[str] = ()
        self._scalings: Mapping[str, Scaling] = {}
        """Workers that there should be, of each model that has none while nobody asks for it."""
        self._there: Collection[str] = ()
        """Models that had a worker at the last look that serves, or rests."""
        self._loads: Mapping[str, float] = {}
        """Seconds until each model that is not loaded anywhere would be, as far as GPUs tell."""
        self.unserved = ServedModel(settings, rng, alone=alone, traces=traces, clock=clock)
        for model in models:
            self._add(model, self._configured.get(model, settings), alone=alone)
        self.unchecked = set(self)
        self._ready = frozenset(self)
        self._note_names()

    def __missing__(self, model: str) -> ServedModel:
        return self.unserved

    def serve(self, served: Mapping[str, Settings]) -> None:
        """Serve these models from now on, with these settings, and no others."""
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
        """Take note of what workers report. A model without a healthy worker keeps what was known of it."""
        workers = list(workers)
        of_each = defaultdict[str, list[WorkerInfo]](list)
        for worker in workers:
            of_each[worker.model].append(worker)
        self.failed, self._loads, self.failing = _failed(workers), _loads(workers), _failing(workers)
        for model, one in self.items():
            one.learn(of_each[model])
            (self.unchecked.discard if one.takes in _CHECKED else self.unchecked.add)(model)
            self._warn_of_absent(model, one.versions)
        healthy = {worker.model for worker in workers if worker.status is WorkerStatus.HEALTHY}
        self._ready = (healthy & self.keys()) | _loadable(workers)
        self._there = {worker.model for worker in workers if worker.status in _WARM}
        self.note_starts(self._scalings)

    def note_starts(self, scalings: Mapping[str, Scaling]) -> bool:
        """Note how many workers there should be of each model that has none while nobody asks for it; whether others are at zero now."""
        before, self._scalings = self.at_zero.keys(), scalings
        at_zero = (model for model in scalings if model not in self._there and model in self)
        self.at_zero = {model: max(scalings[model].starts_in or 0.0, self.failing.get(model, 0.0)) for model in at_zero}
        self.unready = self.at_zero.keys() | self.failed.keys()
        for model in (
            before | self.at_zero.keys()
        ):  # At zero a request's whole time is for the start, not only that in the queue.
            settings = self[model].settings
            wait = settings.request_timeout_ms if model in self.at_zero else settings.queue_timeout_ms
            self[model].queue_timeout = wait / 1000
        return before != self.at_zero.keys()

    def has_worker(self, model: str) -> bool:
        """Whether a healthy worker of a model was there at the last look, or it is loaded or started when it is asked for.

        Not looked at where there is one model.
        """
        return len(self.models) == 1 or model in self._ready or (model in self.at_zero and model not in self.failing)

    def not_loaded(self, entry: Entry) -> Failure | None:
        """Failure of an entry whose model did not load, if no GPU tries again in the time that the entry may wait.

        One with dedup keys goes to the broker: its answer may be kept.
        """
        rest = self.failed.get(entry.model, 0.0)
        waits = bool(entry.dedup_keys) or rest <= min(entry.timeout, entry.queue_timeout)
        return None if waits else failures.not_loaded(entry.model, rest)

    def not_started(self, entry: Entry) -> Failure | None:
        """Failure of an entry whose model is at zero, if no worker is up in the time that the entry may wait; see `not_loaded`."""
        rest = self.at_zero.get(entry.model, 0.0)
        return None if entry.dedup_keys or rest <= HELD_SHARE * entry.timeout else self._no_worker(entry.model, rest)

    def still_at_zero(self, entry: Entry) -> Failure | None:
        """Failure of an entry whose time is over before its model has a worker; None where it has one."""
        rest = self.at_zero.get(entry.model)
        return None if rest is None else self._no_worker(entry.model, max(rest, 1.0))

    def _no_worker(self, model: str, rest: float) -> Failure:
        """Failure because a model at zero has a worker in so many seconds at the soonest."""
        if model in self.failing:
            return failures.not_loaded(model, rest)
        scaling = self._scalings[model]
        return failures.at_zero(model, rest, scaling.awaited if scaling.late else 0.0)

    @property
    def awaited(self) -> Mapping[str, Scaling]:
        """Models at zero that are asked for, with the workers that there should be."""
        return {model: self._scalings[model] for model in self.at_zero if self._scalings[model].desired}

    @property
    def wakes(self) -> bool:
        """Whether a model is at zero, and its start is not known to fail."""
        return any(model not in self.failing for model in self.at_zero)

    def in_time(self, model: str, failure: Failure) -> Failure:
        """Failure of a request for a model that no worker came up for, to be sent again once that is loaded, as far as is known."""
        rest = self._loads.get(model, self.at_zero.get(model))
        if rest is None or failure.code != errors.NO_WORKERS or failure.retry_after is None:
            return failure
        return msgspec.structs.replace(failure, retry_after=max(rest, failure.retry_after))

    def absence(self, model: str, only: Collection[str] = ()) -> Failure:
        """Failure of a request for a model that is not among them, as far as is known now; see `check`."""
        if self.in_doubt():
            return failures.model_unknown(model)
        there = self.visible(only)
        if not model:
            return failures.no_default(there) if there or not only else failures.none_served_for(only)
        return failures.no_model(model, [one if one in self._ready else f"{one} (no worker)" for one in there])

    def visible(self, only: Collection[str]) -> list[str]:
        """Names of the models that a principal may ask. `only`: the only ones of its credential; empty: all."""
        return [model for model in self.models if model in only] if only else self.models

    def default_of(self, only: Collection[str]) -> str:
        """Model that a principal means who names none; empty where there is none, or it may not ask it. `only`: see `visible`."""
        return self.default if not only or self.default in only else ""

    def seen_by(self, only: Collection[str]) -> KnownModels:
        """Models as a credential may know them that may ask `only` some, empty for all. Others are as if they did not exist."""
        return SeenModels(self, only) if only else self

    def refusal(self, model: str, version: str) -> Failure | None:
        """Refusal of a request for a version that no healthy worker runs; None where it is let in, as while the model is at zero."""
        return None if model in self.at_zero else self[model].versions.refusal(model, version, self.in_doubt())

    def example(self, model: str) -> Any:
        """JSON value of the example of a model's target; None where it has none, or that is not known."""
        text = self[model].example
        return msgspec.json.decode(text) if text else None

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        """Failure of a request for a model that is not among the unchecked; None when the model takes its input.

        Arguments:
            model: name of the model; empty where the request names none and there is no default.
            input: value for the model.
            only: see `visible`.
        """
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
        found = "other text" if isinstance(input, str) else f"`{name_of(input)}`"
        return Failure(errors.BAD_REQUEST, f"Expected text in base64, as the model takes octets; got {found}")

    def weigh(self, weights: Mapping[str, Weights]) -> None:
        """Go by other weights of versions, by model, from now on; those at "" are for all other models."""
        self._weights = weights
        for model in self:
            self._set_weights(model)

    def _add(self, model: str, settings: Settings, *, alone: bool) -> None:
        one = self[model] = ServedModel(settings, self._rng, alone=alone, traces=self.traces, clock=self._clock)
        if model in self._configured:
            one.reported = (self._configured[model].model_version,)
        self._set_weights(model)

    def _note_names(self) -> None:
        self.models = sorted(self)
        self.default = self._wanted if self._wanted in self else self.models[0] if len(self.models) == 1 else ""

    def _set_weights(self, model: str) -> None:
        if self._weights is not None:
            self[model].versions.weigh(self._weights.get(model, self._weights[""]))

    def _warn_of_absent(self, model: str, choice: VersionChoice) -> None:
        """Log, when that changes, which versions of a model have a weight and no worker."""
        versions = choice.absent
        if versions != self._absent.get(model, ()):
            self._absent[model] = versions
            if versions:
                others = len(versions) < sum(map(bool, choice.weights.values()))
                meanwhile = (
                    "the others share their requests" if others else "requests that name no version wait for one"
                )
                hint = f"Start workers for them, or mend --version-weights; {meanwhile} meanwhile."
                log.warning(
                    "versions of a model have a weight and no worker",
                    model=model,
                    versions=",".join(versions),
                    hint=hint,
                )


class SeenModels:
    """Models as a credential sees them that may ask `only` some; see ServedModels."""

    def __init__(self, served: ServedModels, only: Collection[str]) -> None:
        self._served, self._only = served, only
        self.refusal = served.refusal

    @property
    def default(self) -> str:
        """Model used when a request names none. Empty if there is no default, or the caller may not use it."""
        return self._served.default_of(self._only)

    def __contains__(self, model: object) -> bool:
        return model in self._only and model in self._served

    def __getitem__(self, model: str) -> ServedModel:
        return self._served[model] if model in self._only else self._served.unserved

    def seen_by(self, only: Collection[str]) -> KnownModels:
        """See ServedModels."""
        return self._served.seen_by(only)

    def check(self, model: str, input: Value, only: Collection[str] = ()) -> Failure | None:
        """See ServedModels."""
        return self._served.check(model, input, only) if model in self else None


KnownModels = ServedModels | SeenModels
"""Models that readers of requests go by."""


def _wrong_tensors(served: ServedModel, input: Value) -> Failure | None:
    """Failure of a request whose tensors a model does not take; of any other value, unless it is JSON that stands for some."""
    try:
        tensors = input if isinstance(input, Tensors) else tensors_of(input, served.inputs)
        header = header_of(tensors)
        check_heads(header.heads, served.inputs)
    except NoTensors as exc:
        return Failure(errors.BAD_REQUEST, str(exc))
    most = served.settings.max_batch_size
    if header.rows > most:
        message = f"the input has {header.rows} rows; at most {most} are taken together (max_batch_size). Send them in several requests"
        return Failure(errors.PAYLOAD_TOO_LARGE, message)
    return None


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


def _failing(workers: Iterable[WorkerInfo]) -> Mapping[str, float]:
    """Models whose workers all start, of which one has failed to, with the seconds until one is tried again."""
    workers = [worker for worker in workers if worker.status is not WorkerStatus.OFFLINE]
    others = {worker.model for worker in workers if worker.status is not WorkerStatus.STARTING}
    failing = {worker.model for worker in workers if worker.start_failed} - others
    return {model: min(worker.retry_in for worker in workers if worker.model == model) for model in failing}


def _loads(workers: Iterable[WorkerInfo]) -> dict[str, float]:
    """Models that are loaded nowhere, with the least seconds that are left of a load, or that a new one takes, where GPUs tell it."""
    rests: dict[str, float] = {}
    warm = set()
    for worker in workers:
        if worker.status in _WARM:
            warm.add(worker.model)
        elif worker.status in _ON_DEMAND and worker.load_seconds:
            rest = worker.retry_in + max(worker.load_seconds - worker.loading, 0.0)
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
