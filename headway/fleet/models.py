"""The models that a fleet serves. They come and go with its workers.

A model in the settings is served with those settings, whether or not it has workers. Any other model is served with the settings
that its worker reports, until the registry has forgotten the last worker that runs it.

If the registry loses its state, it forgets workers that are still running. Their models are served for another UNKNOWN_FOR seconds,
until the workers are back in the registry, so that requests wait instead of failing.

A model is missed if its last workers stopped reporting without having been stopped. Its metrics are exported for another MISSED_FOR
seconds, because an alert about it would otherwise resolve."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from headway.config import FIELDS, Settings, on_terms
from headway.core.health import SILENT_AFTER, UNKNOWN_FOR
from headway.model import ModelReport, WorkerInfo, WorkerStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)

MISSED_FOR = 3600.0  # Seconds for which a lost model counts as missed. Counters of unserved models are kept as long.
Serve = Callable[[Mapping[str, Settings]], None]  # Makes a process serve exactly these models.


class FleetModels:
    """The fleet's models, as one process knows them. `named` are the models that the settings name. `serve` is called with the settings
    of all models whenever a model or its settings change, and `forget` with a model that hasn't been served for MISSED_FOR seconds. If
    `presumes` is set and the settings name no model, the default model is served, so that requests wait for its worker."""

    def __init__(
        self, settings: Settings, serve: Serve, clock: Callable[[], float], forget: Callable[[str], None], *, presumes: bool = True,
    ) -> None:  # fmt: skip
        self._settings = settings
        presumed = not settings.models and settings.model == FIELDS["model"].default
        self.named: Collection[str] = () if presumed else settings.served.keys()
        self._own = settings.served if presumes or not presumed else {}
        self._presumed = settings.model if presumed and presumes else ""  # Served until a worker reports another.
        self._serve, self._clock, self._forget = serve, clock, forget
        self._left_at: dict[str, float] = {}
        self._silent: set[str] = set()  # Models with a worker that stopped reporting without having been stopped.
        self._terms: dict[str, ModelReport] = {}
        self._online: Collection[str] = ()  # Models with a worker that wasn't offline at the last report.
        self._lost: dict[str, float] = {}  # When each model that the registry has lost stops being served.
        self._heard_at = -math.inf
        self._served: Mapping[str, Settings] = self._own
        self._warned: set[tuple[str, str, tuple[str, ...]]] = set()

    @property
    def served(self) -> Mapping[str, Settings]:
        return self._served

    @property
    def counted(self) -> Collection[str]:
        """Models whose metrics are exported: those served, and those missed (see the top of this file)."""
        return {*self._served, *(self._left_at.keys() & self._silent)}

    def in_doubt(self) -> bool:
        """Return True if there may be unknown models, because the registry hasn't been read for a while."""
        return self._clock() - self._heard_at > SILENT_AFTER

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        self._heard_at = self._clock()
        reports = _reports(workers)
        self._note_lost(workers, reports)
        self._silent -= reports.keys()
        self._silent |= {worker.model for worker in workers if worker.status is WorkerStatus.OFFLINE and worker.reason}
        self._warn_of_namesakes(workers)
        served = dict(self._own)
        for model, report in reports.items():
            if model not in self._own:
                known = self._served.get(model)
                unchanged = known is not None and self._terms.get(model) == report
                served[model] = known if known and unchanged else on_terms(self._settings, model, report.terms)
        if self._presumed and len(served) > 1 and self._presumed not in reports:
            del served[self._presumed]
            self._warn_of_lost_fallback(reports)
        self._terms = reports
        if served.keys() != self._served.keys() or any(served[name] is not self._served[name] for name in served):
            self._log_changes(served)
            self._served = served
            self._serve(served)
        self._forget_the_past()

    def _note_lost(self, workers: Iterable[WorkerInfo], reports: dict[str, ModelReport]) -> None:
        """Add to `reports` the last report of each model that disappeared from the registry within the last UNKNOWN_FOR seconds."""
        now = self._heard_at
        self._lost = {model: until for model, until in self._lost.items() if until > now and model not in reports}
        self._lost |= {model: now + UNKNOWN_FOR for model in self._online if model not in reports}
        self._online = {worker.model for worker in workers if worker.status is not WorkerStatus.OFFLINE}
        reports |= {model: self._terms[model] for model in self._lost}

    def _forget_the_past(self) -> None:
        now = self._clock()
        self._left_at = {model: at for model, at in self._left_at.items() if model not in self._served}
        for model, at in list(self._left_at.items()):
            if now - at > MISSED_FOR:
                del self._left_at[model]
                self._silent.discard(model)
                self._forget(model)

    def _log_changes(self, served: Mapping[str, Settings]) -> None:
        for model in served.keys() - self._served.keys():
            log.info("now serving a model", model=model, max_batch_size=served[model].max_batch_size)
        for model in self._served.keys() - served.keys():
            self._left_at[model] = self._clock()
            log.info("no longer serving a model: it has no worker", model=model)

    def _warn_of_lost_fallback(self, reports: Iterable[str]) -> None:
        if self._settings.fallback and self._presumed in self._served:
            hint = "Name the model that it is for, with --model or in a table [models.NAME] of the settings file."
            log.warning("the fallback is for a model that no worker runs", model=self._presumed,
                        models=",".join(sorted(reports)), hint=hint)  # fmt: skip

    def _warn_of_namesakes(self, workers: Iterable[WorkerInfo]) -> None:
        """Warn about workers that run different targets as the same version of a model: any of them may answer."""
        runs: dict[tuple[str, str], dict[str, str]] = {}
        for worker in workers:
            if worker.status is WorkerStatus.HEALTHY and worker.runs.target:
                workers_by_target = runs.setdefault((worker.model, worker.runs.version), {})
                workers_by_target.setdefault(worker.runs.target, worker.worker_id)
        clashes = {(model, version, tuple(sorted(ids))): ids for (model, version), ids in runs.items() if len(ids) > 1}
        for clash, ids in clashes.items():
            if clash not in self._warned:
                hint = "Give each target a version of its own (--model-version), or serve only one of them."
                log.warning(
                    "workers run different targets as the same version of a model",
                    model=clash[0], version=clash[1], workers=", ".join(sorted(ids.values())), hint=hint,
                )  # fmt: skip
        self._warned = set(clashes)


def _reports(workers: Iterable[WorkerInfo]) -> dict[str, ModelReport]:
    """Return the report of each model's first healthy worker or, if none is healthy, of its first worker."""
    first: dict[str, WorkerInfo] = {}
    for worker in sorted(workers, key=lambda worker: (worker.status is not WorkerStatus.HEALTHY, worker.worker_id)):
        first.setdefault(worker.model, worker)
    return {model: worker.runs for model, worker in first.items()}
