"""One model that a gateway serves. It turns requests into entries, based on its settings, versions and workers' reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic

from headway.config import CHARS, Settings
from headway.core import batch_cost, call_parameters, failures, ratelimit, rows
from headway.core.dedup import digest
from headway.core.health import UNKNOWN_FOR
from headway.core.rollout import weights_of
from headway.core.tensors import NoTensors, check_heads, header_of, opening_of, rows_of
from headway.core.versions import Versions, Weights, position_of, read_weights, versions_of
from headway.core.weight_estimate import UNKNOWN, estimated, mean_line
from headway.gateway.pending import SeveralInputs
from headway.gateway.request_traces import RequestTraces
from headway.model import (
    ALL_PARAMETERS,
    KINDS,
    DedupKey,
    DedupKind,
    Entry,
    Failure,
    InferenceRequest,
    Limit,
    PerCall,
    RequestOptions,
    Rollout,
    RowsTogether,
    Tensors,
    TensorSpec,
    Value,
    ValueKind,
    WorkerInfo,
    WorkerStatus,
)


class VersionChoice:
    """Versions of one model, as far as this gateway knows. Until workers report versions, the `configured` version applies.

    Attributes:
        any: True if any worker may answer requests that don't name a version, because no worker claims by version.
        label: version under which identical requests share answers while `any` is True.
        weights: current weights by version. A rollout overrides the weights in the settings.
        rollout: the model's last rollout; None if there was none.
    """

    __slots__ = (
        "_clock", "_configured", "_lost", "_named", "_present", "_rng", "_versions", "_workers", "any", "label", "rollout", "weights",
    )  # fmt: skip

    def __init__(
        self, configured: str, weights: Weights, rng: Callable[[], float], clock: Callable[[], float] = monotonic
    ) -> None:
        self._configured = self.weights = weights
        self._rng, self._clock = rng, clock
        self.rollout: Rollout | None = None
        self._present: Collection[str] = ()  # Versions that had workers at the last check.
        self._lost: dict[str, float] = {}  # Versions without workers, with the time until which they may return.
        self.any, self.label = True, configured
        self._named: Sequence[str] = (configured,)
        self._versions: Versions | None = None
        self._workers: Sequence[WorkerInfo] = ()

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Update from the model's workers. If there are none, keep using the previous ones."""
        self._workers = workers = workers or self._workers
        self._note_lost(workers)
        self.weights = self._weights()
        versions = versions_of(workers, self.weights)
        if versions is not None:
            self.any, self._versions = False, versions
            return
        if self._versions is None and _have_left(workers):
            self.any, self._versions = False, Versions({}, (), self.weights)
            return
        named = {
            worker.runs.version for worker in workers if worker.status is WorkerStatus.HEALTHY and worker.runs.version
        }
        if named:  # If there are two versions, either may answer, so the label names both.
            self.any, self._versions = True, None
            self._named, self.label = sorted(named), ",".join(sorted(named))

    def _note_lost(self, workers: Sequence[WorkerInfo]) -> None:
        now, known = self._clock(), {worker.version or worker.runs.version for worker in workers}
        self._lost = {version: until for version, until in self._lost.items() if until > now and version not in known}
        self._lost |= {version: now + UNKNOWN_FOR for version in self._present if version not in known}
        self._present = {
            worker.version or worker.runs.version for worker in workers if worker.status is not WorkerStatus.OFFLINE
        }

    @property
    def sole(self) -> str | None:
        """Version for requests that don't name one: empty for the shared queue, or None if each request draws a version."""
        return "" if self._versions is None else self._versions.only

    @property
    def absent(self) -> Sequence[str]:
        """Versions that have a weight but no worker."""
        return self._versions.absent if self._versions is not None else ()

    def weigh(self, weights: Weights) -> None:
        """Set the weights that apply when there is no rollout."""
        self._configured = weights
        self.roll(self.rollout)

    def roll(self, rollout: Rollout | None) -> bool:
        """Follow a rollout. Returns True if this changes the weights."""
        self.rollout = rollout
        if self._weights() == self.weights:
            return False
        self.learn(self._workers)
        return True

    def _weights(self) -> Weights:
        return weights_of(self.rollout, self._configured, self._present)

    def version(self, tenant: str, id: str, options: RequestOptions, several: SeveralInputs | None) -> str:
        """Return the version whose queue a request joins; empty for the shared queue. All inputs of a list get the version
        drawn for the first, even if the weights change meanwhile. Requests that a client may repeat to get the same answer
        always get the same version."""
        if several is None:
            return self._chosen(tenant, id, options, again=False)
        if several.version is None:
            several.version = self._chosen(tenant, id, options, again=True)
        return several.version

    def _chosen(self, tenant: str, id: str, options: RequestOptions, again: bool) -> str:
        versions = self._versions
        if versions is None:
            return ""
        if options.version:
            return options.version
        if versions.only is not None:
            return versions.only
        if again or options.key or options.chosen or options.task:
            return versions.drawn(position_of(tenant, options.key or id))
        return versions.drawn(self._rng())

    def refusal(self, model: str, version: str, in_doubt: bool) -> Failure | None:
        """Return the failure for a request that names a version; None if the version accepts requests. `in_doubt`: see ServedModels."""
        if self._versions is None:
            taken, open_versions = list(self._named) == [version], self._named
        else:
            taken, open_versions = self._versions.takes(version), self._versions.open
        if taken:
            return None
        if (in_doubt or self._lost.get(version, 0.0) > self._clock()) and self.weights.get(version) != 0.0:
            return failures.version_unknown(model, version)
        return failures.no_version(model, version, open_versions)


def _have_left(workers: Sequence[WorkerInfo]) -> bool:
    """Return True if all workers are gone, and some of them claimed only for their version. The next worker may have another
    version, so requests that name a version mustn't join the shared queue."""
    return any(worker.version for worker in workers) and all(
        worker.status is WorkerStatus.OFFLINE for worker in workers
    )


_MOST_KNOWN = 256  # Maximum number of tensor headers to remember.
_STRICT = (
    RowsTogether.SHAPE,
    RowsTogether.PADDED,
)  # Rules that keep some rows apart. If workers report several, the first one here applies.


class ServedModel:
    """A model that a gateway serves. `alone` means that the process serves no other model.

    If the weight of batches is limited, an input's weight is its number of characters, or the result of the target's weight function.
    Workers run this function, and report how its result depends on the input's length. So the gateway estimates weights from the
    length, without running user code.

    If workers take tensors, an input's weight is its number of rows, or the function's result if that is larger. Rate limits count
    a request once for each row.

    Attributes:
        reported: versions that workers run. Before the first worker, the version in the settings.
        takes, gives: kinds of its inputs and outputs; None while unknown. `takes` is also None while only some workers take
            tensors, for example while the target is being changed.
        inputs, outputs: specifications of its tensors; empty if there are none, or while unknown.
        example: the target's example as JSON; empty if there is none, or while unknown.
        seen: parameters that reach the targets of all workers; all parameters while unknown.
        per_call: parameters that apply to a whole call. Only requests with the same values share a batch.
        sharing: True if identical requests share answers.
        queue_timeout: seconds that a request may wait in the queue; longer while the model is at zero.
        longest, longest_task: maximum timeouts in seconds; infinite if the port already limits timeouts.
        weigh: returns the weight of an input, at least 1.
    """

    __slots__ = (
        "_line", "_padded", "_rows", "_together", "_unweighed", "_weighs", "example", "gives", "inputs", "longest", "longest_task", "outputs", "per_call", "queue_timeout", "reported", "seen",
        "settings", "sharing", "takes", "traces", "versions", "weigh",
    )  # fmt: skip

    def __init__(
        self,
        settings: Settings,
        rng: Callable[[], float],
        *,
        alone: bool,
        traces: RequestTraces | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.settings, self.traces = settings, traces
        self.versions = VersionChoice(settings.model_version, read_weights(settings.version_weights), rng, clock)
        self.reported: tuple[str, ...] = ()
        self.takes: ValueKind | None = None
        self.gives: ValueKind | None = None
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.example = ""
        self.seen: PerCall = ALL_PARAMETERS
        self.longest = math.inf if alone else settings.request_timeout_ms / 1000
        self.longest_task = math.inf if alone else settings.task_timeout_ms / 1000
        self.sharing = settings.cache or settings.collapse
        self.queue_timeout = settings.queue_timeout_ms / 1000
        self._line = UNKNOWN
        self._together: RowsTogether | None = None
        self.per_call: PerCall = ()
        self._unweighed: dict[bytes, bool] = {}  # Results of `takes_unweighed`, by the bytes that precede the data.
        self._set_weigh(rows=False, padded=False)

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Update from the reports of the model's workers. If none is healthy, only the versions are updated."""
        self.versions.learn(workers)
        healthy = [worker for worker in workers if worker.status is WorkerStatus.HEALTHY]
        if not healthy:
            return
        kinds = {worker.takes for worker in healthy}
        rows = ValueKind.TENSORS.value in kinds
        self.takes = None if rows and len(kinds) > 1 else _kind_of(kinds)
        self.gives = _kind_of(worker.gives for worker in healthy)
        self.seen = call_parameters.seen(healthy)
        self.per_call = call_parameters.per_call(healthy)
        self._set_weigh(rows=rows, padded=bool(batch_cost.padded(healthy)))
        self.example = next((worker.example for worker in healthy if worker.example), "")
        inputs = next((worker.inputs for worker in healthy if worker.inputs), ())
        outputs = next((worker.outputs for worker in healthy if worker.outputs), ())
        # Keep identical specifications, because caches compare them by identity.
        if inputs != self.inputs or outputs != self.outputs:
            self.inputs, self.outputs = inputs, outputs
        self._unweighed.clear()
        rules = {worker.together for worker in healthy}
        self._together = next((rule for rule in _STRICT if rule in rules), None)
        versions = {worker.runs.version for worker in healthy if worker.runs.version}
        self.reported = tuple(sorted(versions)) or self.reported
        self._line = mean_line(worker.weight for worker in healthy if worker.weight is not None) or self._line

    def follow(self, former: ServedModel) -> None:
        """Copy what workers reported for the same model under its previous settings."""
        self.takes, self.gives, self.example = former.takes, former.gives, former.example
        self.inputs, self.outputs, self.reported = former.inputs, former.outputs, former.reported
        self._together, self.seen, self.per_call = former._together, former.seen, former.per_call
        self._set_weigh(rows=former._rows, padded=former._padded)
        self.versions.roll(former.versions.rollout)

    def _set_weigh(self, *, rows: bool, padded: bool) -> None:
        settings = self.settings
        self._rows, self._padded = rows, padded
        weighs = padded or settings.max_batch_weight > 0
        self._weighs = rows or weighs or self.per_call != ()
        self.weigh: Callable[[Value], int] = lambda input: 1
        if self._rows:
            self.weigh = self._weight_of_rows
        elif weighs:
            self.weigh = self._estimate if settings.weight != CHARS else lambda input: len(input) or 1

    def sees(self, name: str) -> bool:
        return self.seen == ALL_PARAMETERS or name in self.seen

    def counted(self, inputs: Sequence[Value]) -> int:
        return sum(map(rows_of, inputs)) if self._rows else len(inputs)

    @property
    def is_plain(self) -> bool:
        """True if all requests may use a lane, because none needs a drawn version, dedup keys, a trace or a weight."""
        return self._is_unmarked and not self._weighs

    @property
    def takes_rows(self) -> bool:
        """True if single tensor rows may use a lane, because they weigh 1 and don't need a drawn version, dedup keys or a trace."""
        texts = self.takes is not ValueKind.TENSORS
        return self._is_unmarked and not (texts or self.settings.max_batch_weight or self.per_call)

    @property
    def _is_unmarked(self) -> bool:
        return self.versions.sole is not None and not self.sharing and self.traces is None

    def takes_unweighed(self, input: Value) -> bool:
        """Return True for a single row of valid tensors that weighs 1 and may share a batch with any other row."""
        if type(input) is not Tensors:
            return False
        opening = opening_of(input.content)
        known = self._unweighed.get(opening)
        if known is None:
            known = self._judge_unweighed(input)
            if opening and len(self._unweighed) < _MOST_KNOWN:
                self._unweighed[opening] = known
        return known

    def _judge_unweighed(self, input: Tensors) -> bool:
        try:
            header = header_of(input)
            check_heads(header.heads, self.inputs)
        except NoTensors:
            return False
        together = self._together or RowsTogether.ANY
        return header.rows == 1 and not rows.shape_number(input, together, self.inputs, self.settings.max_batch_size)

    def entry(
        self,
        request: InferenceRequest,
        limits: tuple[Limit, ...],
        gateway: str,
        nonce: int,
        several: SeveralInputs | None,
        any_version: bool,
    ) -> Entry:
        """Return the entry for a request. `any_version`: True if workers of any version may answer it."""
        principal, options = request.principal, request.options
        timeout, longest = options.timeout, self.longest_task if options.task else self.longest
        if timeout > longest:
            timeout = longest
        choice, origin, tenant, known = self.versions, options.origin, principal.tenant, b""
        version, label = "", choice.label
        if not (choice.any or any_version):
            version = label = choice.version(tenant, request.id, options, several)
        dedup_keys: tuple[DedupKey, ...] = ()
        if self.sharing or options.key or options.chosen or options.task:
            if several is None:
                asked = digest(request.model, options.version, request.input, request.parameters)
            else:
                asked = several.digest_of(request.model, options.version, request.input)
            dedup_keys = dedup_keys_of(self.settings, request.id, asked, options, label)
            known = asked if options.chosen and not options.task else b""
        trace = b""
        if self.traces is not None and (
            nonce >= self.traces.sampler.due or options.trace is not options.replays or several is not None
        ):  # Most requests aren't sampled, don't name a span (of a client or dead letter), and have a single input.
            trace = self.traces.begin(options, several, nonce)
        payer, count, weight, shape = 0, 1, 1, 0
        if self._weighs:
            weight, limits = self._weighed(request.input, limits, several)
            if self._together is not None:
                shape = rows.shape_number(request.input, self._together, self.inputs, self.settings.max_batch_size)
            if self.per_call:
                shape = call_parameters.shape_number(request.parameters, self.per_call, shape)
        if several is not None:
            if not several.payer:
                several.payer, count = nonce, several.count
            payer = several.payer
        return Entry(
            request.id, request.model, request.input, principal.tier if principal.tier > options.tier else options.tier, tenant, gateway,
            timeout if options.task else self.queue_timeout, timeout, request.parameters, nonce,
            principal.user if origin is None else origin, weight,
            version, bool(options.version), dedup_keys, trace, limits, known, payer, count, options.task and options.chosen, shape,
        )  # fmt: skip

    def _weighed(
        self, input: Value, limits: tuple[Limit, ...], several: SeveralInputs | None
    ) -> tuple[int, tuple[Limit, ...]]:
        """Return the weight of an input, and limits that charge for its rows. For a list, the limits already charge for all rows."""
        if self._rows and limits and several is None and (counted := rows_of(input)) > 1:
            limits = ratelimit.all_counting_as(limits, counted)
        return self.weigh(input), limits

    def _weight_of_rows(self, input: Value) -> int:
        settings = self.settings
        weight = rows.weight(input, settings.max_batch_size, settings.max_batch_weight)
        by_function = settings.max_batch_weight > 0 and settings.weight != CHARS
        return max(weight, self._estimate(input)) if by_function else weight

    def _estimate(self, input: Value) -> int:
        return estimated(self._line, input)


def dedup_keys_of(
    settings: Settings, id: str, asked: bytes, options: RequestOptions, version: str
) -> tuple[DedupKey, ...]:
    """Return the dedup keys of a request with digest `asked`. `version` lists the versions that may answer, separated by
    commas; identical requests share only answers from these. Tasks and idempotency keys don't depend on it."""
    dedup_keys = []
    if options.task:
        dedup_keys.append(DedupKey(DedupKind.TASK, id, asked, settings.result_ttl_s))
    if options.key:
        dedup_keys.append(DedupKey(DedupKind.KEY, options.key, options.whole or asked, settings.result_ttl_s))
    shares = settings.cache or settings.collapse
    if options.fresh:
        shares = settings.cache and not options.unkept  # Its own answer is fresh, but may be kept for later requests.
    if shares:
        keep = settings.result_ttl_s / 2 if settings.cache else 0.0
        joins = settings.collapse and not options.fresh
        dedup_keys.append(DedupKey(DedupKind.SAME, f"{asked.hex()}@{version}", b"", keep, joins, options.fresh))
    return tuple(dedup_keys)


def _kind_of(names: Iterable[str]) -> ValueKind:
    """Return the first of KINDS that workers name. Older workers don't name one, which means text."""
    named = set(names)
    return next((known.kind for known in KINDS if known.kind.value in named), ValueKind.TEXT)
