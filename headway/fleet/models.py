"""Models of a fleet, as its workers report them: they come and go while its processes run.

A model that a process has settings for is served as these say, whether it has a worker or not. Any other is served from
the moment at which a worker reports it, on the terms that this one reports, until the registry has forgotten the last.

A registry that has lost its state has forgotten workers that never said that they leave. Their models are served on for as long
as they may take to come back, so that requests wait for them.

A model whose last workers went silent is missed: its figures are exported for longer than it is served, or an alert for it
would end by itself. One whose workers all left in good order is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from headway.config import FIELDS, Settings, on_terms
from headway.core.health import SILENT_AFTER, UNKNOWN_FOR
from headway.model import ModelReport, WorkerInfo, WorkerStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)

MISSED_FOR = 3600.0
"""Seconds for which a model is missed, and after which what was counted of a model that is not served is forgotten."""

Serve = Callable[[Mapping[str, Settings]], None]
"""Function that has a process serve these models, and no others."""


class FleetModels:
    """Models of the fleet, as one process knows them.

    Arguments:
        settings: settings of the process.
        serve: called with the settings of all models whenever there are others, or other terms.
        clock: monotonic seconds.
        forget: called with a model that has not been served for long.
        presumes: whether a model is presumed where the settings name none, so that requests wait for its worker.

    Attributes:
        named: names of the models that the settings name.
    """

    def __init__(
        self,
        settings: Settings,
        serve: Serve,
        clock: Callable[[], float],
        forget: Callable[[str], None],
        *,
        presumes: bool = True,
    ) -> None:
        self._settings = settings
        presumed = _is_presumed(settings)
        self.named: Collection[str] = () if presumed else settings.served.keys()
        self._own = settings.served if presumes or not presumed else {}
        self._presumed = settings.model if presumed and presumes else ""
        """Model that is served only as long as nothing is known of the fleet, as nobody has named it."""
        self._serve, self._clock, self._forget = serve, clock, forget
        self._left_at: dict[str, float] = {}
        """Instant since which each model is not served that was."""
        self._silent: set[str] = set()
        """Models of which a worker that nobody has told to stop was silent, at the last report of any worker."""
        self._terms: dict[str, ModelReport] = {}
        self._there: Collection[str] = ()
        """Models that had a worker at the last report, and not only one that has left or gone silent."""
        self._lost: dict[str, float] = {}
        """Until when each model that the registry has lost is served on, in monotonic seconds."""
        self._heard_at = -math.inf
        self._served: Mapping[str, Settings] = self._own
        self._told: set[tuple[str, str, tuple[str, ...]]] = set()

    @property
    def served(self) -> Mapping[str, Settings]:
        """Settings of the models that are served now."""
        return self._served

    @property
    def counted(self) -> Collection[str]:
        """Names of the models that are served now, and of those that are missed."""
        return {*self._served, *(self._left_at.keys() & self._silent)}

    def in_doubt(self) -> bool:
        """Whether there may be other models than those that are served, as the registry has not been read for a while."""
        return self._clock() - self._heard_at > SILENT_AFTER

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of the models that workers report."""
        self._heard_at = self._clock()
        reports = _reports(workers)
        self._note_lost(workers, reports)
        self._silent -= reports.keys()
        self._silent |= {one.model for one in workers if one.status is WorkerStatus.OFFLINE and one.reason}
        self._warn_of_namesakes(workers)
        served = dict(self._own)
        for model, report in reports.items():
            if model not in self._own:
                known = self._served.get(model)
                told_again = known is not None and self._terms.get(model) == report
                served[model] = known if known and told_again else on_terms(self._settings, model, report.terms)
        if self._presumed and len(served) > 1 and self._presumed not in reports:
            del served[self._presumed]
            self._warn_of_lost_fallback(reports)
        self._terms = reports
        if served.keys() != self._served.keys() or any(served[name] is not self._served[name] for name in served):
            self._tell(served)
            self._served = served
            self._serve(served)
        self._forget_the_past()

    def _note_lost(self, workers: Iterable[WorkerInfo], reports: dict[str, ModelReport]) -> None:
        """Add to the reports those on models that were there and are nowhere in the registry any more."""
        now = self._heard_at
        self._lost = {model: until for model, until in self._lost.items() if until > now and model not in reports}
        self._lost |= {model: now + UNKNOWN_FOR for model in self._there if model not in reports}
        self._there = {one.model for one in workers if one.status is not WorkerStatus.OFFLINE}
        reports |= {model: self._terms[model] for model in self._lost}

    def _forget_the_past(self) -> None:
        now = self._clock()
        self._left_at = {model: at for model, at in self._left_at.items() if model not in self._served}
        for model, at in list(self._left_at.items()):
            if now - at > MISSED_FOR:
                del self._left_at[model]
                self._silent.discard(model)
                self._forget(model)

    def _tell(self, served: Mapping[str, Settings]) -> None:
        for model in served.keys() - self._served.keys():
            log.info("a model is served", model=model, max_batch_size=served[model].max_batch_size)
        for model in self._served.keys() - served.keys():
            self._left_at[model] = self._clock()
            log.info("a model is no longer served, as it has no worker", model=model)

    def _warn_of_lost_fallback(self, reports: Iterable[str]) -> None:
        """Log that the fallback answers for a model that is served no more, as nobody has named it."""
        if self._settings.fallback and self._presumed in self._served:
            hint = "Name the model that it is for, by --model or in a table [models.NAME] of the settings file."
            log.warning("the fallback is for a model that nobody runs", model=self._presumed,
                        models=",".join(sorted(reports)), hint=hint)  # fmt: skip

    def _warn_of_namesakes(self, workers: Iterable[WorkerInfo]) -> None:
        """Log that workers run different targets under one name and version: answers come from either."""
        targets: dict[tuple[str, str], dict[str, str]] = {}
        for worker in workers:
            if worker.status is WorkerStatus.HEALTHY and worker.runs.target:
                of_one = targets.setdefault((worker.model, worker.runs.version), {})
                of_one.setdefault(worker.runs.target, worker.worker_id)
        there = {(model, version, tuple(sorted(found))) for (model, version), found in targets.items()}
        self._told &= there
        for (model, version), found in targets.items():
            key = model, version, tuple(sorted(found))
            if len(found) > 1 and key not in self._told:
                self._told.add(key)
                hint = "Give each target a version of its own (--model-version), or serve one of them."
                log.warning(
                    "workers run different targets under one model and version",
                    model=model, version=version, workers=", ".join(sorted(found.values())), hint=hint,
                )  # fmt: skip


def _is_presumed(settings: Settings) -> bool:
    return not settings.models and settings.model == FIELDS["model"].default


def _reports(workers: Iterable[WorkerInfo]) -> dict[str, ModelReport]:
    """Report on each model: that of its first healthy worker or, where there is none, of its first."""
    found: dict[str, tuple[bool, str, ModelReport]] = {}
    for worker in workers:
        this = worker.status is not WorkerStatus.HEALTHY, worker.worker_id, worker.runs
        if worker.model not in found or this[:2] < found[worker.model][:2]:
            found[worker.model] = this
    return {model: report for model, (_, _, report) in found.items()}
