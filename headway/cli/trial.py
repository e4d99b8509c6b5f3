"""Trial of a target in batches of every size, for `headway check`. It checks the rules and fits the cost of a batch."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway.cli.trial_inputs import weights_of
from headway.core import call_parameters, deadlines
from headway.core.batch_cost import BatchCost
from headway.core.service_model import ServiceModel
from headway.core.tensors import rows_of
from headway.core.values import shown
from headway.core.weight_estimate import WeightEstimate
from headway.errors import BackendError, BatchRaised, BatchTimeout, TargetError, WorkerCrashed
from headway.model import Entry, ItemResult, PerCall, Signature, Value
from headway.ports import Backend
from headway.runtime.logger import get_logger
from headway.runtime.request_id import new_id
from headway.simulator.batch_times import RecordedBatch

log = get_logger(__name__)

MOST_ANSWERS = 5


class Run(msgspec.Struct, frozen=True):
    """A batch of the trial. `size` counts rows, and one for an input without rows."""

    size: int
    seconds: float


class Findings(msgspec.Struct):
    """Findings of a trial. Times are in seconds.

    `runs` are batches that succeeded. `recorded` has all batches to record, or none. `answers` are some inputs, each with its
    output in the largest batch that ran. `cost` is fitted to the lengths or weights of inputs without rows. `weight` is the mean
    weight by a weight function; 0 if there is none. A target without `faults` is fit to serve. `unit` is `input`, or `row` if an
    input has several rows. `per_call` are parameters that a call has only once.
    """

    warm_up: float = 0.0
    runs: list[Run] = msgspec.field(default_factory=list)
    recorded: list[RecordedBatch] = msgspec.field(default_factory=list)
    answers: list[tuple[Value, Value]] = msgspec.field(default_factory=list)
    model: ServiceModel = msgspec.field(default_factory=ServiceModel)
    cost: BatchCost = msgspec.field(default_factory=BatchCost)
    weight: float = 0.0
    faults: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    unit: str = "input"
    per_call: PerCall = ()

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)


def _fitted(runs: Sequence[Run]) -> ServiceModel:
    """Fit a line to the median of each size, so that a single slow run doesn't matter."""
    model = ServiceModel()
    times: dict[int, list[float]] = {}
    for run in runs:
        times.setdefault(run.size, []).append(run.seconds)
    for size, seconds in times.items():
        model.observe(size, statistics.median(seconds))
    return model


def sizes(largest: int) -> list[int]:
    """Return the batch sizes to try: powers of two, and `largest`."""
    return [size for size in (1 << power for power in range(largest.bit_length())) if size < largest] + [largest]


class Trial:
    """Trial of one backend, which it starts but leaves its owner to stop.

    `choose` returns the inputs of the largest batch for the target's signature. `parameters` are JSON, or empty. `timeout` is the
    longest run of a batch in seconds. `repeats` is the number of batches of each size. `limits` are deadlines in ms by setting,
    which a slow model is advised to raise. `record` returns the batches to record if the target breaks no rule; None to record
    none. `weights` has the weights of the last batch's inputs; None if their lengths are their weights.
    """

    def __init__(
        self, backend: Backend, choose: Callable[[Signature], Sequence[Value]], parameters: bytes, timeout: float, model: str,
        repeats: int, clock: Callable[[], float] = time.monotonic, limits: Mapping[str, float] = MappingProxyType({}),
        record: Callable[[Signature], Iterable[Sequence[Value]]] | None = None, weights: WeightEstimate | None = None,
    ) -> None:  # fmt: skip
        self._backend, self._choose, self._record, self._weights = backend, choose, record, weights
        self._parameters, self._timeout, self._model, self._repeats = parameters, timeout, model, repeats
        self._clock = clock
        self._inputs: Sequence[Value] = ()
        self._limits = {"gpu_timeout_ms": timeout * 1000, **limits}
        self._findings = Findings()
        # Reason, and True if user code raised, to the sizes of the batches that failed; each is one fault.
        self._failures: dict[tuple[str, bool], list[int]] = {}
        self._bad_outputs: set[str | None] = set()  # Errors of outputs that are among the faults.
        self._overdue = False  # A batch missed the deadline, so larger ones need not be tried.

    async def run(self) -> Findings:
        """Try everything. Raises TargetError if the target cannot be loaded, or its warm-up batch fails."""
        findings = self._findings
        try:
            findings.warm_up = await self._backend.start()
        except TargetError as exc:
            self._trace(exc)
            raise
        self._inputs, findings.per_call = self._choose(self._backend.signature), self._backend.signature.per_call
        if unseen := call_parameters.unseen(self._parameters, self._backend.signature.sees):
            why = "its together does not name them" if findings.per_call else "it takes no parameters"
            findings.notes.append(f"the target does not see: {', '.join(unseen)}; {why}")
        if _rows(self._inputs) > len(self._inputs):
            findings.unit = "row"
        last: dict[int, list[Value] | None] = {}
        for size in sizes(len(self._inputs)):
            if self._overdue:
                findings.notes.append(f"larger batches than {_rows(self._inputs[: max(last)])} were not tried")
                break
            for _ in range(self._repeats):
                outputs = await self._batch(self._inputs[:size])
                if outputs is None:
                    last[size] = None
                    break
                if last.get(size, outputs) != outputs and _UNSTEADY not in findings.notes:
                    findings.notes.append(_UNSTEADY)
                last[size] = outputs
                findings.answers = _first_apart(self._inputs[:size], outputs)
        whole, single = last.get(len(self._inputs)), last[1]
        if whole is not None and single is not None and _UNSTEADY not in findings.notes:
            self._check_alone(single[0], whole)
            await self._check_order(whole)
        if self._record is not None and not findings.faults and not self._failures:
            await self._record_times(self._record(self._backend.signature))
        await self._tell_failures()
        findings.model = _fitted(findings.runs)
        return findings

    async def _record_times(self, batches: Iterable[Sequence[Value]]) -> None:
        """Record the times of batches, or none if one of them fails."""
        recorded = []
        for batch in batches:
            timed = await self._run_batch(batch)
            if timed is None or self._outputs(batch, timed[1]) is None:
                return
            recorded.append(RecordedBatch(self._weighed(batch), timed[0]))
        self._findings.recorded = recorded

    def _weighed(self, batch: Sequence[Value]) -> list[int]:
        return weights_of(batch) if self._weights is None else list(self._weights.latest)

    def _check_alone(self, alone: Value, whole: list[Value]) -> None:
        if alone == whole[0]:
            return
        if alone in whole:
            self._findings.fault(_DISORDER)
        else:
            self._findings.notes.append("an input alone and the same input in a batch have different outputs")

    async def _check_order(self, whole: list[Value]) -> None:
        """Send the largest batch in other orders, in which every output must move with its input. The orders are a rotation by one
        and an exchange of the first two. They generate all orders, so one of them exposes any target that rearranges its outputs
        in a fixed way."""
        positions = list(range(len(whole)))
        if len(set(whole)) == 1 and len(set(self._inputs)) > 1:
            self._findings.notes.append("all outputs are equal, so their order cannot be checked; try --input")
            return
        for order in (positions[1:] + positions[:1], positions[1::-1] + positions[2:]):
            outputs = await self._batch([self._inputs[position] for position in order])
            expected = [whole[position] for position in order]
            if outputs is None or outputs == expected:
                continue
            if Counter(outputs) == Counter(expected):
                self._findings.fault(_DISORDER)
            elif _DEPENDS not in self._findings.notes:
                self._findings.notes.append(_DEPENDS)

    async def _batch(self, inputs: Sequence[Value]) -> list[Value] | None:
        """Run a batch and return its outputs. Return None, and add a fault, if an input has none."""
        timed = await self._run_batch(inputs)
        if timed is None:
            return None
        run = Run(_rows(inputs), timed[0])
        self._findings.runs.append(run)
        self._findings.model.observe(run.size, run.seconds)
        return self._outputs(inputs, timed[1])

    async def _run_batch(self, inputs: Sequence[Value]) -> tuple[float, Sequence[ItemResult]] | None:
        """Run a batch and return its seconds and results. Return None, and note the reason, if it failed."""
        begun = self._clock()
        try:
            items = await self._backend.run(self._entries(inputs), self._timeout)
        except BatchTimeout:
            self._findings.fault(self._late(_rows(inputs)))
            self._overdue = True
            await self._backend.start()
            return None
        except BackendError as exc:
            if self._failed(_rows(inputs), exc):
                self._trace(exc)
            if isinstance(exc, WorkerCrashed):
                await self._backend.start()
            return None
        seconds = self._clock() - begun
        if self._findings.unit == "input" and (weights := self._weighed(inputs)):
            self._findings.cost.observe(weights, seconds)
        return seconds, items

    def _entries(self, inputs: Sequence[Value]) -> list[Entry]:
        model, timeout, parameters = self._model, self._timeout, self._parameters
        return [Entry(new_id(), model, text, 0, "check", "check", timeout, timeout, parameters) for text in inputs]

    def _failed(self, size: int, error: BackendError) -> bool:
        """Note a failed batch. Return True if it is the first with this reason."""
        sizes = self._failures.setdefault((str(error), isinstance(error, BatchRaised)), [])
        if size not in sizes:
            sizes.append(size)
        return sizes == [size]

    async def _tell_failures(self) -> None:
        for (reason, raised), failed in self._failures.items():
            *some, last = map(str, failed)
            of = f"batches of {', '.join(some)} and {last}" if some else f"a batch of {last}"
            hint = f". {_OTHER_INPUTS}" if raised and _rows(self._inputs[:1]) in failed else ""
            culprit = await self._culprit(reason) if raised else ""
            self._findings.fault(f"{of} failed: {reason}{culprit}{hint}")

    async def _culprit(self, reason: str) -> str:
        """Name the first of several inputs that makes the target raise even alone; empty if none does."""
        inputs = list(dict.fromkeys(self._inputs))
        for value in inputs if len(inputs) > 1 else ():
            try:
                await self._backend.run(self._entries([value]), self._timeout)
            except BatchRaised as exc:
                if str(exc) == reason:
                    return f", as the input {shown(value)[:40]!r} does alone"
            except BackendError:
                break
        return ""

    def _late(self, size: int) -> str:
        """Describe a batch that missed its deadline, and name settings for the largest batch if its time is known."""
        seconds = self._findings.warm_up
        if self._findings.runs:
            seconds = max(self._findings.model.seconds(size), self._findings.model.seconds(_rows(self._inputs)))
        fits = deadlines.flags(seconds, self._limits) if seconds > self._timeout else ""
        ways = " or" if size == 1 else ", lower --max-batch-size, or"
        return (
            f"a batch of {size} took longer than --gpu-timeout-ms {self._timeout * 1000:g}, after which its worker is "
            f"killed. Make the model faster{ways} {f'start with {fits}' if fits else 'raise --gpu-timeout-ms'}"
        )

    def _trace(self, exc: TargetError | BackendError) -> None:
        if exc.trace:
            log.error("the target raised", error=str(exc), exception=exc.trace)

    def _outputs(self, inputs: Sequence[Value], items: Sequence[ItemResult]) -> list[Value] | None:
        outputs = [item.output for item in items if item.output is not None]
        bad = [position for position, item in enumerate(items) if item.output is None]
        if bad:
            self._add_first(inputs, items, bad)
        return None if bad else outputs

    def _add_first(self, inputs: Sequence[Value], items: Sequence[ItemResult], bad: Sequence[int]) -> None:
        """Add a fault for the first bad output of a batch. Other bad outputs most likely have the same reason."""
        position = bad[0]
        error = items[position].error
        if items[position].fault:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            if error not in self._bad_outputs:
                self._findings.fault(f"input {position + 1} of {len(items)}{more}: {error}")
            self._bad_outputs.add(error)
        else:
            self._findings.fault(f"the target rejects {shown(inputs[position])[:40]!r}: {error}. {_OTHER_INPUTS}")


def _first_apart(inputs: Sequence[Value], outputs: Sequence[Value]) -> list[tuple[Value, Value]]:
    answers: dict[Value, Value] = {}
    for value, output in zip(inputs, outputs, strict=True):
        if len(answers) < MOST_ANSWERS:
            answers.setdefault(value, output)
    return list(answers.items())


def _rows(inputs: Sequence[Value]) -> int:
    return sum(map(rows_of, inputs))


_OTHER_INPUTS = "If it asks for other inputs, give some with --input, or one as its attribute example."
_DISORDER = "outputs are not in the order of their inputs: return outputs[i] for inputs[i]"
_DEPENDS = "an input's output depends on the others in its batch, or on their order"
_UNSTEADY = "the same batch has different outputs from run to run, so their order cannot be checked"
