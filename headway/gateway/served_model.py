"""One model that a gateway serves: what its settings say of requests for it, and what its workers report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from headway.config import CHARS, Settings
from headway.core import batch_cost, call_parameters, ratelimit, rows
from headway.core.dedup import digest
from headway.core.tensors import NoTensors, check_heads, header_of, opening_of, rows_of
from headway.core.versions import read_weights
from headway.core.weight_estimate import UNKNOWN, estimated, mean_line
from headway.gateway.pending import SeveralInputs
from headway.gateway.request_traces import RequestTraces
from headway.gateway.version_choice import VersionChoice
from headway.model import (
    ALL_PARAMETERS,
    KINDS,
    DedupKey,
    DedupKind,
    Entry,
    InferenceRequest,
    Limit,
    PerCall,
    RequestOptions,
    RowsTogether,
    Tensors,
    TensorSpec,
    Value,
    ValueKind,
    WorkerInfo,
    WorkerStatus,
)

_MOST_KNOWN = 256
"""Most headers of tensors of which it is known whether they have to be weighed."""
_STRICT = (RowsTogether.SHAPE, RowsTogether.PADDED)
"""Ways in which rows may not all run in one call. While workers differ, the first counts."""


class ServedModel:
    """One model of a gateway.

    Where batches are bounded by weight, inputs weigh their characters, or what a function of the target counts. That function
    runs in the workers, which report by which line its result follows from the length of an input. So an input is weighed here
    without a call of user code, and without a look at more than its length.

    Where workers take tensors, an input weighs its rows, or more if batches are bounded by weight and a function of the target
    counts more. A request counts towards rate limits as many times as it has rows.

    Arguments:
        settings: settings of the model.
        alone: whether the process serves no other model.
        rng: uniform in [0, 1), by which versions are drawn.
        traces: traces of the requests; None where none are recorded.
        clock: monotonic seconds.

    Attributes:
        settings: settings of the model.
        versions: choice of the version that answers.
        reported: versions that workers run or, before there is one, that is to be run.
        takes, gives: kinds of its inputs and outputs; None while they are not known, and where some workers take tensors and
            others something else, as while a fleet changes to another target.
        inputs, outputs: specifications of its tensors; empty where it has none, or while they are not known.
        example: JSON text of the example of its target; empty where it has none, or that is not known.
        seen: parameters that all workers' targets get; all while that is not known.
        per_call: parameters that a call has once, so that only requests ride together whose values of these are equal.
        sharing: whether identical requests share answers.
        queue_timeout: seconds that a request may wait in the queue; more while the model is at zero.
        longest: most seconds of a request in all; infinite where its connection sees to that.
        longest_task: most seconds of a task.
        weigh: returns the weight of an input. An empty one weighs 1.
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
        self._unweighed: dict[bytes, bool] = {}
        """Whether values with these bytes before their data have to be weighed no more."""
        self._set_weigh(rows=False, padded=False)

    def learn(self, workers: Sequence[WorkerInfo]) -> None:
        """Take note of what the model's workers report. Without a healthy one what was known stays."""
        self.versions.learn(workers)
        healthy = [one for one in workers if one.status is WorkerStatus.HEALTHY]
        if not healthy:
            return
        named = {one.takes for one in healthy}
        rows = ValueKind.TENSORS.value in named
        self.takes = (
            None if rows and len(named) > 1 else _largest(named)
        )  # Each worker judges, while some take tensors.
        self.gives = _largest(one.gives for one in healthy)
        self.seen = call_parameters.seen(healthy)
        self.per_call = call_parameters.per_call(healthy)
        self._set_weigh(rows=rows, padded=bool(batch_cost.padded(healthy)))
        self.example = next((one.example for one in healthy if one.example), "")
        inputs = next((one.inputs for one in healthy if one.inputs), ())
        outputs = next((one.outputs for one in healthy if one.outputs), ())
        if (inputs, outputs) != (
            self.inputs,
            self.outputs,
        ):  # Else they stay the same objects, for those who remember by them.
            self.inputs, self.outputs = inputs, outputs
        self._unweighed.clear()
        self._together = next((one for one in _STRICT if one in {worker.together for worker in healthy}), None)
        self.reported = tuple(sorted({one.runs.version for one in healthy if one.runs.version})) or self.reported
        self._line = mean_line(one.weight for one in healthy if one.weight is not None) or self._line

    def follow(self, former: ServedModel) -> None:
        """Know what was known of the model while it had other settings."""
        self.takes, self.gives, self.example = former.takes, former.gives, former.example
        self.inputs, self.outputs, self.reported = former.inputs, former.outputs, former.reported
        self._together, self.seen = former._together, former.seen
        self.per_call = former.per_call
        self._set_weigh(rows=former._rows, padded=former._padded)
        self.versions.roll(former.versions.rollout)

    def _set_weigh(self, *, rows: bool, padded: bool) -> None:
        """Have inputs weigh their rows or, where batches are bounded by weight or inputs filled up, what the settings say."""
        settings = self.settings
        self._rows, self._padded = rows, padded
        weighs = padded or settings.max_batch_weight > 0
        self._weighs = rows or weighs or self.per_call != ()
        self.weigh: Callable[[Value], int] = _one
        if self._rows:
            self.weigh = self._weight_of_rows
        elif weighs:
            self.weigh = self._estimate if settings.weight != CHARS else _characters

    def sees(self, name: str) -> bool:
        """Whether all workers' targets get the parameter of this name."""
        return self.seen == ALL_PARAMETERS or name in self.seen

    def counted(self, inputs: Sequence[Value]) -> int:
        """Requests as which a request with these inputs counts towards a rate limit."""
        return sum(map(rows_of, inputs)) if self._rows else len(inputs)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but its answer has to be known of a request whose options ask for nothing rare."""
        return self._is_unmarked and not self._weighs

    @property
    def takes_rows(self) -> bool:
        """Whether that holds but for the weight of its input, and all workers take tensors, whose rows weigh one each."""
        texts = self.takes is not ValueKind.TENSORS
        return self._is_unmarked and not (texts or self.settings.max_batch_weight or self.per_call)

    @property
    def _is_unmarked(self) -> bool:
        return self.versions.sole is not None and not self.sharing and self.traces is None

    def takes_unweighed(self, input: Value) -> bool:
        """Whether an input is one row of tensors as the model takes them, weighs one, and may run with all others."""
        if type(input) is not Tensors:
            return False
        opening = opening_of(input.content)
        found = self._unweighed.get(opening)
        if found is None:
            found = self._judge_unweighed(input)
            if opening and len(self._unweighed) < _MOST_KNOWN:
                self._unweighed[opening] = found
        return found

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
        """Make the entry of a request.

        Arguments:
            request: the request.
            limits: limits that it counts towards.
            gateway: name of the gateway.
            nonce: number of the submission.
            several: request with several inputs of which this is one.
            any_version: whether any worker may answer it, whatever it runs.
        """
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
        ):  # Few requests are drawn, name a span (a client's or a dead letter's), or have several inputs.
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
        """Weight of an input, and the limits that it counts towards, in which its rows count. Those of a list do already."""
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
    """Dedup keys of a request.

    Arguments:
        settings: settings of the model: whether identical requests share answers, and for how long outcomes are kept.
        id: id of the request.
        asked: digest of what it asks.
        options: whether it is a task, has an idempotency key, or needs an answer of its own.
        version: version of the model that is to answer, or several with commas between them, of which any may. Identical
            requests share the answers of these only. A task or an idempotency key stands for its request whichever
            version answers.
    """
    dedup_keys = []
    if options.task:
        dedup_keys.append(DedupKey(DedupKind.TASK, id, asked, settings.result_ttl_s))
    if options.key:
        dedup_keys.append(DedupKey(DedupKind.KEY, options.key, options.whole or asked, settings.result_ttl_s))
    shares = settings.cache or settings.collapse
    if options.fresh:
        shares = settings.cache and not options.unkept  # Later requests may get its answer.
    if shares:
        keep = settings.result_ttl_s / 2 if settings.cache else 0.0
        joins = settings.collapse and not options.fresh
        dedup_keys.append(DedupKey(DedupKind.SAME, f"{asked.hex()}@{version}", b"", keep, joins, options.fresh))
    return tuple(dedup_keys)


def _one(input: Value) -> int:
    return 1


def _characters(input: Value) -> int:
    return len(input) or 1


def _largest(named: Iterable[str]) -> ValueKind:
    """Kind that counts of those that workers name. A worker of a release that names none takes and gives text."""
    there = set(named)
    return next((one.kind for one in KINDS if one.kind.value in there), ValueKind.TEXT)
