"""Trial of a target in batches of every size: judges it by the rules, and fits the cost of a batch."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headway.cli.recording import weights_of
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
"""Most inputs of which the answer is kept."""


class Run(msgspec.Struct, frozen=True):
    """A batch of the trial: its size, in rows, and its run time in seconds. An input that has no rows is one."""

    size: int
    seconds: float


class Findings(msgspec.Struct):
    """Findings of a trial.

    Attributes:
        warm_up: run time of the warm-up batch in seconds.
        runs: batches that came to an end.
        recorded: run times of the batches that were to be recorded, all or none.
        answers: some of the inputs, no two alike, each with its output in a batch as large as could be.
        model: service model fitted to them.
        cost: cost of calls by the lengths of their inputs, or what these weigh by a function of the target. Of rows nothing is learnt.
        weight: mean weight of the inputs by a function of the target; 0 where they are not weighed.
        faults: rules that were broken; empty when the target is fit to serve.
        notes: remarks that are no faults.
        unit: what sizes count: `input`, or `row` where an input has several.
        per_call: parameters that a call has once.
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
        """Add a fault, once."""
        if text not in self.faults:
            self.faults.append(text)


def _fitted(runs: Sequence[Run]) -> ServiceModel:
    """Line through the median of each size: a run that was held up once says nothing of the size."""
    model = ServiceModel()
    times: dict[int, list[float]] = {}
    for run in runs:
        times.setdefault(run.size, []).append(run.seconds)
    for size, seconds in times.items():
        model.observe(size, statistics.median(seconds))
    return model


def sizes(most: int) -> list[int]:
    """The batch sizes that are tried: powers of two up to `most`, and `most`."""
    return [size for size in (1 << power for power in range(most.bit_length())) if size < most] + [most]


class Trial:
    """Trial of one backend, which it starts and leaves for its owner to stop.

    Arguments:
        backend: a backend that is not started yet.
        choose: returns the inputs to send to a target of a signature, one for each place of the largest batch.
        parameters: parameters of every input; text of a JSON object, or empty.
        timeout: longest run of a batch in seconds.
        model: name that the target is served under.
        repeats: batches of each size.
        clock: monotonic seconds.
        limits: deadlines in ms, by setting, which a slow model is advised to raise.
        record: returns the batches whose times to record if the target breaks no rule; None for none.
        weights: estimate that has noted what the inputs of the last batch weighed; None: they are weighed by their length.
    """

    def __init__(
        self,
        backend: Backend,
        choose: Callable[[Signature], Sequence[Value]],
        parameters: bytes,
        timeout: float,
        model: str,
        repeats: int,
        clock: Callable[[], float] = time.monotonic,
        limits: Mapping[str, float] = MappingProxyType({}),
        record: Callable[[Signature], Iterable[Sequence[Value]]] | None = None,
        weights: WeightEstimate | None = None,
    ) -> None:
        self._backend = backend
        self._choose = choose
        self._inputs: Sequence[Value] = ()
        self._parameters = parameters
        self._timeout = timeout
        self._model = model
        self._repeats = repeats
        self._clock = clock
        self._record = record
        self._weights = weights
        self._limits = {"gpu_timeout_ms": timeout * 1000, **limits}
        self._found = Findings()
        self._failures: dict[tuple[str, bool], list[int]] = {}
        """Sizes of the batches that failed, by the reason and whether user code raised; each is one fault."""
        self._bad_outputs: set[str | None] = set()
        """Faults of outputs that are told of."""
        self._overdue = False
        """Whether a batch ran beyond the deadline, so that larger ones need not be tried."""

    async def run(self) -> Findings:
        """Try everything.

        Raises:
            TargetError: the target cannot be loaded or fails its warm-up batch.
        """
        found = self._found
        try:
            found.warm_up = await self._backend.start()
        except TargetError as exc:
            self._trace(exc)
            raise
        self._inputs, found.per_call = self._choose(self._backend.signature), self._backend.signature.per_call
        if unseen := call_parameters.unseen(self._parameters, self._backend.signature.sees):
            why = "its together does not name them" if found.per_call else "it takes no parameters"
            found.notes.append(f"the target does not see: {', '.join(unseen)}; {why}")
        if _rows(self._inputs) > len(self._inputs):
            found.unit = "row"
        last: dict[int, list[Value] | None] = {}
        for size in sizes(len(self._inputs)):
            if self._overdue:
                found.notes.append(f"larger batches than {_rows(self._inputs[: max(last)])} were not tried")
                break
            for _ in range(self._repeats):
                outputs = await self._batch(self._inputs[:size])
                if outputs is None:
                    last[size] = None
                    break
                if last.get(size, outputs) != outputs and _UNSTEADY not in found.notes:
                    found.notes.append(_UNSTEADY)
                last[size] = outputs
                found.answers = _first_apart(self._inputs[:size], outputs)
        whole, single = last.get(len(self._inputs)), last[1]
        if whole is not None and single is not None and _UNSTEADY not in found.notes:
            self._check_alone(single[0], whole)
            await self._check_order(whole)
        if self._record is not None and not found.faults and not self._failures:
            await self._record_times(self._record(self._backend.signature))
        await self._tell_failures()
        found.model = _fitted(found.runs)
        return found

    async def _record_times(self, batches: Iterable[Sequence[Value]]) -> None:
        """Time batches, until one of them fails."""
        recorded = []
        for batch in batches:
            ran = await self._ran(batch)
            if ran is None or self._outputs(batch, ran[1]) is None:
                return
            recorded.append(RecordedBatch(self._weighed(batch), ran[0]))
        self._found.recorded = recorded

    def _weighed(self, batch: Sequence[Value]) -> list[int]:
        """Weights of the inputs of the batch that ran last."""
        return weights_of(batch) if self._weights is None else list(self._weights.latest)

    def _check_alone(self, alone: Value, whole: list[Value]) -> None:
        """Compare the first input's output alone and in the largest batch."""
        if alone == whole[0]:
            return
        if alone in whole:
            self._found.fault(_DISORDER)
        else:
            self._found.notes.append("an input alone and the same input in a batch have different outputs")

    async def _check_order(self, whole: list[Value]) -> None:
        """Send the largest batch in other orders: every output must move with its input.

        The orders are a rotation by one and an exchange of the first two. Together they generate all orders, so
        that a target which rearranges its outputs, in whatever fixed way, is caught by one of them.
        """
        positions = list(range(len(whole)))
        if len(set(whole)) == 1 and len(set(self._inputs)) > 1:
            self._found.notes.append("all outputs are equal, so their order cannot be checked; try --input")
            return
        for order in (positions[1:] + positions[:1], positions[1::-1] + positions[2:]):
            outputs = await self._batch([self._inputs[position] for position in order])
            expected = [whole[position] for position in order]
            if outputs is None or outputs == expected:
                continue
            if Counter(outputs) == Counter(expected):
                self._found.fault(_DISORDER)
            elif _DEPENDS not in self._found.notes:
                self._found.notes.append(_DEPENDS)

    async def _batch(self, inputs: Sequence[Value]) -> list[Value] | None:
        """Outputs of one batch; None when there is not one for each input, which is then among the findings."""
        ran = await self._ran(inputs)
        if ran is None:
            return None
        run = Run(_rows(inputs), ran[0])
        self._found.runs.append(run)
        self._found.model.observe(run.size, run.seconds)
        return self._outputs(inputs, ran[1])

    async def _ran(self, inputs: Sequence[Value]) -> tuple[float, Sequence[ItemResult]] | None:
        """Run time in seconds of one batch, and what came of it; None when it failed, which is then among the findings."""
        begun = self._clock()
        try:
            items = await self._backend.run(self._entries(inputs), self._timeout)
        except BatchTimeout:
            self._found.fault(self._late(_rows(inputs)))
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
        if self._found.unit == "input" and (weights := self._weighed(inputs)):
            self._found.cost.observe(weights, seconds)
        return seconds, items

    def _entries(self, inputs: Sequence[Value]) -> list[Entry]:
        return [
            Entry(new_id(), self._model, text, 0, "check", "check", self._timeout, self._timeout, self._parameters)
            for text in inputs
        ]

    def _failed(self, size: int, error: BackendError) -> bool:
        """Keep a failed batch; returns whether it is the first one for its reason."""
        sizes = self._failures.setdefault((str(error), isinstance(error, BatchRaised)), [])
        if size not in sizes:
            sizes.append(size)
        return sizes == [size]

    async def _tell_failures(self) -> None:
        """Add the reasons for which batches failed to the faults, each with the sizes of those batches."""
        for (reason, raised), failed in self._failures.items():
            *some, last = map(str, failed)
            of = f"batches of {', '.join(some)} and {last}" if some else f"a batch of {last}"
            hint = f". {_OTHER_INPUTS}" if raised and _rows(self._inputs[:1]) in failed else ""
            culprit = await self._culprit(reason) if raised else ""
            self._found.fault(f"{of} failed: {reason}{culprit}{hint}")

    async def _culprit(self, reason: str) -> str:
        """Words on the first of several inputs that makes the target raise alone; empty where none does."""
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
        """Fault of a batch that took longer than its deadline, with the settings that would fit the largest, if they are known."""
        seconds = self._found.warm_up
        if self._found.runs:
            seconds = max(self._found.model.seconds(size), self._found.model.seconds(_rows(self._inputs)))
        fits = deadlines.flags(seconds, self._limits) if seconds > self._timeout else ""
        ways = " or" if size == 1 else ", lower --max-batch-size, or"
        return (
            f"a batch of {size} took longer than --gpu-timeout-ms {self._timeout * 1000:g}, after which its worker is "
            f"killed. Make the model faster{ways} {f'start with {fits}' if fits else 'raise --gpu-timeout-ms'}"
        )

    def _trace(self, exc: TargetError | BackendError) -> None:
        """Log the traceback of what user code raised."""
        if exc.trace:
            log.error("the target raised", error=str(exc), exception=exc.trace)

    def _outputs(self, inputs: Sequence[Value], items: Sequence[ItemResult]) -> list[Value] | None:
        outputs = [item.output for item in items if item.output is not None]
        bad = [position for position, item in enumerate(items) if item.output is None]
        if bad:
            self._tell_first(inputs, items, bad)
        return None if bad else outputs

    def _tell_first(self, inputs: Sequence[Value], items: Sequence[ItemResult], bad: Sequence[int]) -> None:
        """Add a fault for the first bad output of a batch; the others are most likely bad for the same reason."""
        position = bad[0]
        error = items[position].error
        if items[position].fault:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            if error not in self._bad_outputs:
                self._found.fault(f"input {position + 1} of {len(items)}{more}: {error}")
            self._bad_outputs.add(error)
        else:
            self._found.fault(f"the target rejects {shown(inputs[position])[:40]!r}: {error}. {_OTHER_INPUTS}")


def _first_apart(inputs: Sequence[Value], outputs: Sequence[Value]) -> list[tuple[Value, Value]]:
    """First inputs that are not alike, each with its output."""
    answers: dict[Value, Value] = {}
    for value, output in zip(inputs, outputs, strict=True):
        if len(answers) < MOST_ANSWERS:
            answers.setdefault(value, output)
    return list(answers.items())


def _rows(inputs: Sequence[Value]) -> int:
    """Rows of some inputs together."""
    return sum(map(rows_of, inputs))


_OTHER_INPUTS = "If it asks for other inputs, give some with --input, or one as its attribute example."
_DISORDER = "outputs are not in the order of their inputs: return outputs[i] for inputs[i]"
_DEPENDS = "an input's output depends on the others in its batch, or on their order"
_UNSTEADY = "the same batch has different outputs from run to run, so their order cannot be checked"
