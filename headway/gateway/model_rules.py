"""Rules of each model that a gateway serves: what its settings say of requests for it."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic

from headway.config import Settings
from headway.core.dedup import dedup_keys_of, digest
from headway.core.versions import Weights, read_weights
from headway.gateway.request_traces import RequestTraces
from headway.gateway.several_inputs import SeveralInputs
from headway.gateway.version_choice import VersionChoice
from headway.gateway.weigher import Weigher
from headway.model import DedupKey, Entry, Limit, Principal, RequestOptions, Value, WorkerInfo
from headway.runtime.logger import get_logger

log = get_logger(__name__)


class ModelRules:
    """Rules of one model.

    Arguments:
        model: name of the model.
        settings: settings of the model.
        alone: whether the process serves no other model.
        rng: uniform in [0, 1), by which versions are drawn.
        traces: traces of the requests; None where none are recorded.
        clock: monotonic seconds.

    Attributes:
        settings: settings of the model.
        versions: choice of the version that answers.
        sharing: whether identical requests share answers.
        queue_timeout: seconds that a request may wait in the queue.
        longest: most seconds of a request in all; infinite where its connection sees to that.
        longest_task: most seconds of a task.
        weigher: weigher of inputs.
    """

    __slots__ = (
        "_weigh", "_weighs", "longest", "longest_task", "queue_timeout", "settings", "sharing", "traces", "versions", "weigher",
    )  # fmt: skip

    def __init__(
        self,
        model: str,
        settings: Settings,
        rng: Callable[[], float],
        *,
        alone: bool,
        traces: RequestTraces | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.settings, self.traces = settings, traces
        self.versions = VersionChoice(settings.model_version, read_weights(settings.version_weights), rng, clock)
        self.longest = math.inf if alone else settings.request_timeout_ms / 1000
        self.longest_task = math.inf if alone else settings.task_timeout_ms / 1000
        self.weigher = Weigher(settings, model)
        self.sharing = settings.cache or settings.collapse
        self.queue_timeout = settings.queue_timeout_ms / 1000
        self._weighs = settings.max_batch_weight > 0
        self._weigh: Callable[[Value], int] = self.weigher.weigh

    @property
    def is_plain(self) -> bool:
        """Whether nothing but its answer has to be known of a request whose options ask for nothing rare."""
        return self.versions.any and not self.sharing and not self._weighs and self.traces is None

    def entry(
        self,
        principal: Principal,
        id: str,
        options: RequestOptions,
        model: str,
        input: Value,
        parameters: bytes,
        limits: tuple[Limit, ...],
        gateway: str,
        nonce: int,
        several: SeveralInputs | None,
        any_version: bool,
    ) -> Entry:
        """Make the entry of a request.

        Arguments:
            principal: principal of the request.
            id: id of the request.
            options: options of the request.
            model: name of the model.
            input: the value for the model.
            parameters: text of a JSON object, or empty.
            limits: limits that it counts towards.
            gateway: name of the gateway.
            nonce: number of the submission.
            several: request with several inputs of which this is one.
            any_version: whether any worker may answer it, whatever it runs.
        """
        timeout, longest = options.timeout, self.longest_task if options.task else self.longest
        if timeout > longest:
            timeout = longest
        choice, origin, tenant, known = self.versions, options.origin, principal.tenant, b""
        version, label = "", choice.label
        if not (choice.any or any_version):
            version = label = choice.version(tenant, id, options, several)
        dedup_keys: tuple[DedupKey, ...] = ()
        if self.sharing or options.key or options.chosen or options.task:
            if several is None:
                asked = digest(model, options.version, input, parameters)
            else:
                asked = several.digest_of(model, options.version, input)
            dedup_keys = dedup_keys_of(self.settings, id, asked, options, label)
            known = asked if options.chosen and not options.task else b""
        trace, traces = b"", self.traces
        if traces is not None and (
            nonce >= traces.sampler.due or options.trace is not options.replays or several is not None
        ):  # Few requests are drawn, name a span (a client's or a dead letter's), or have several inputs.
            trace = traces.begin(options, several, nonce)
        payer, count = 0, 1
        if several is not None:
            if not several.payer:
                several.payer, count = nonce, several.count
            payer = several.payer
        return Entry(
            id, model, input, principal.tier if principal.tier > options.tier else options.tier, tenant, gateway,
            timeout if options.task else self.queue_timeout, timeout, parameters, limits, dedup_keys, nonce, known,
            principal.user if origin is None else origin, self._weigh(input) if self._weighs else 1,
            version, bool(options.version), trace, payer, count, options.task and options.chosen,
        )  # fmt: skip


class RuleTable(dict[str, ModelRules]):
    """Rules by model; those of a model that is not served are `unserved`.

    Arguments:
        settings: settings of the process.
        models: names of the models at first.
        rng: uniform in [0, 1), by which versions are drawn.
        clock: monotonic seconds.

    Attributes:
        unserved: rules of requests for any other model, which are refused.
        traces: traces of the requests; None where none are recorded.
    """

    def __init__(
        self,
        settings: Settings,
        models: Iterable[str],
        rng: Callable[[], float] = random.random,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__()
        of_each: Mapping[str, Settings] = settings.served
        alone = not settings.models
        self._settings: Mapping[str, Settings] = of_each
        self._rng, self._clock = rng, clock
        self.traces: RequestTraces | None = None
        self._weights: Mapping[str, Weights] | None = None
        """Weights that are in force instead of those of the settings."""
        self._absent: dict[str, Sequence[str]] = {}
        """Versions of each model that have a weight and no worker, as the log has them."""
        self.unserved = ModelRules("", settings, rng, alone=alone, clock=clock)
        for model in models:
            self[model] = ModelRules(model, of_each.get(model, settings), rng, alone=alone, clock=clock)

    def __missing__(self, model: str) -> ModelRules:
        return self.unserved

    def serve(self, served: Mapping[str, Settings]) -> None:
        """Go by these settings from now on, and know no other models."""
        for gone in self.keys() - served.keys():
            del self[gone]
            self._absent.pop(gone, None)
        for model, settings in served.items():
            if model not in self or self._settings.get(model) is not settings:
                self[model] = ModelRules(model, settings, self._rng, alone=False, traces=self.traces, clock=self._clock)
                self._set_weights(model)
        self._settings = served

    def trace(self, traces: RequestTraces) -> None:
        """Record the traces of requests from now on."""
        self.traces = traces
        for rules in (self.unserved, *self.values()):
            rules.traces = traces

    def note_admitted(self, entry: Entry) -> None:
        """Note that the broker has an entry."""
        if self.traces is not None:
            self.traces.admitted(entry)

    def note_detached(self, entry: Entry) -> None:
        """Note that the client of a task has its id, and waits no longer."""
        if self.traces is not None:
            self.traces.detached(entry)

    def weigh(self, weights: Mapping[str, Weights]) -> None:
        """Go by other weights of versions, by model, from now on; those at "" are for all other models."""
        self._weights = weights
        for model in self:
            self._set_weights(model)

    def _set_weights(self, model: str) -> None:
        if self._weights is not None:
            self[model].versions.weigh(self._weights.get(model, self._weights[""]))

    def learn(self, workers: Iterable[WorkerInfo]) -> None:
        """Take note of what workers report of weights and versions."""
        of_each = defaultdict[str, list[WorkerInfo]](list)
        for worker in workers:
            of_each[worker.model].append(worker)
        for model, rules in self.items():
            rules.weigher.learn(of_each[model])
            rules.versions.learn(of_each[model])
            self._warn_of_absent(model, rules.versions)

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
