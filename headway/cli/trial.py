"""Tries a target with batches of every size, for `headway check`: checks the rules for targets, and fits the cost of a
batch. Inputs come from the command line or the target's example, or else are numbered strings."""

from __future__ import annotations

import base64
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import msgspec

from headway.config.fields import joined
from headway.core import call_parameters, deadlines, tensor_json, values
from headway.core.batch_cost import BatchCost
from headway.core.service_model import ServiceModel
from headway.core.tensors import rows_of
from headway.core.values import shown
from headway.core.weight_estimate import WeightEstimate
from headway.errors import BackendError, BatchRaised, BatchTimeout, SettingError, TargetError, WorkerCrashed
from headway.model import KIND, Entry, ItemResult, PerCall, Signature, Value, ValueKind
from headway.ports import Backend
from headway.runtime.logger import get_logger
from headway.runtime.request_id import new_id
from headway.simulator.batch_times import BatchTimes, RecordedBatch

log = get_logger(__name__)


ROUND = 72  # Recorded batches for each repeat: a multiple of 24, so that each mixture gets each size equally often.
FULL_EVERY = 4  # Every fourth recorded batch has the largest size, which is the most frequent under load.
MIXTURES = (None, 0, None, 1, None, 2)  # In turn, batches draw from all inputs (None), or one third (0: the lightest).
POOR = 0.1  # Relative error above which a recording gets a note.
_MOST_CHARS, _MOST_MEMBERS = 60, 4
_HINTS = {
    ValueKind.JSON: "For example --input '{\"a\": 1}'.",
    ValueKind.BYTES: "Write them in base64, for example --input aGVhZHdheQ==.",
    ValueKind.TENSORS: "Write the numbers of a row, or of several, as JSON, for example --input '[1, 2, 3]'.",
}


def choose_inputs(given: Sequence[str], largest: int, signature: Signature) -> list[Value]:
    """Return the inputs of the largest batch, made from the `given` strings or the target's example. `largest` counts rows.
    Raises SettingError if an input is of the wrong kind, or there is none."""
    chosen = read_inputs(given, largest, signature)
    return up_to(largest, [chosen[n % len(chosen)] for n in range(largest)])


def up_to(largest: int, inputs: Sequence[Value]) -> list[Value]:
    """Return the first inputs that together have at most `largest` rows, but at least one input."""
    ends = accumulate(map(rows_of, inputs))
    return [value for place, (value, end) in enumerate(zip(inputs, ends, strict=True)) if not place or end <= largest]


def read_inputs(given: Sequence[str], largest: int, signature: Signature) -> list[Value]:
    """Return all inputs to choose from; see `choose_inputs`."""
    chosen = [_read(text, signature) for text in given]
    for text, value in zip(given, chosen, strict=True):
        if (rows := rows_of(value)) > largest:
            hint = "Give fewer rows, or set --max-batch-size higher."
            raise SettingError("--input", text, f"has {rows} rows, but a batch has at most {largest}", hint)
    if not chosen and signature.example is not None:
        chosen = [signature.example]
    if not chosen and signature.takes is not ValueKind.TEXT:
        what, hint = KIND[signature.takes].noun, _HINTS[signature.takes]
        raise SettingError("--input", "", f"is needed: the target takes {what} and has no example", hint)
    return chosen or [f"headway check {n}" for n in range(largest)]


def read_lines(path: Path | None) -> list[str]:
    """Return the non-empty lines of a file. Raises SettingError if the file cannot be read, or has no such line."""
    if path is None:
        return []
    hint = "Name a text file with one input per line."
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except OSError as exc:
        raise SettingError("--inputs", str(path), f"cannot be read: {exc.strerror}", hint) from None
    except UnicodeDecodeError:
        raise SettingError("--inputs", str(path), "is not UTF-8 text", "Save it as UTF-8.") from None
    if not lines:
        raise SettingError("--inputs", str(path), "has no input", hint)
    return [line.removesuffix("\r") for line in lines]


def brief(value: Value) -> str:
    """Format a value for one line. Cut a long value, and show only the first members of a long array."""
    text = value if isinstance(value, str) else _brief(values.build(value))
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"


def _brief(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_brief(name)}: {_brief(member)}' for name, member in value.items())}}}"
    if isinstance(value, list):
        shown = ", ".join(map(_brief, value[:_MOST_MEMBERS]))
        return f"[{shown}]" if len(value) <= _MOST_MEMBERS else f"[{shown}, … {len(value):,} in all]"
    return f"{value:.6g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


def _read(text: str, signature: Signature) -> Value:
    if signature.takes is ValueKind.TEXT:
        return text
    what, hint = KIND[signature.takes].noun, _HINTS[signature.takes]
    if signature.takes is ValueKind.TENSORS:
        hint = "Write such numbers of a row, or of several, as JSON."  # The example in _HINTS may be what was refused.
    try:
        if signature.takes is ValueKind.JSON:
            return values.read(text.encode())
        if signature.takes is ValueKind.TENSORS:
            return tensor_json.tensors_of(values.read(text.encode()), signature.inputs)
        base64.b64decode(text, validate=True)
    except (ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise SettingError("--input", text, f"cannot be used for a target that takes {what}: {exc}", hint) from None
    return text


def weight(value: Value) -> int:
    """Return the weight per row of an input, in characters for text and in bytes otherwise."""
    return max(1, len(value) // rows_of(value))


def weights_of(batch: Sequence[Value]) -> list[int]:
    """Return the weights of all rows in a batch. An input without rows counts as one row."""
    return [weight(value) for value in batch for _ in range(rows_of(value))]


def batches_to_record(given: Sequence[str], largest: int, repeats: int, signature: Signature) -> Iterator[list[Value]]:
    """Yield `repeats` rounds of ROUND batches of up to `largest` rows, made from the `given` strings. They have all sizes, and
    short, medium and long inputs. Their order is random, so that a slowdown of the machine affects all kinds of batches alike."""
    rng = random.Random(0)  # noqa: S311 - the same batches each time
    inputs = sorted(read_inputs(given, largest, signature), key=weight)
    thirds = [inputs[len(inputs) * third // 3 : len(inputs) * (third + 1) // 3] or inputs for third in range(3)]
    count, spread = ROUND * repeats, math.log(largest + 0.5)
    plan = []
    for number in range(count):
        size = largest if number % FULL_EVERY == FULL_EVERY - 1 else round(math.exp((number + 0.5) / count * spread))
        third = MIXTURES[(number + number // FULL_EVERY) % len(MIXTURES)]
        plan.append((min(size, largest), inputs if third is None else thirds[third]))
    rng.shuffle(plan)
    for size, pool in plan:
        yield up_to(size, rng.choices(pool, k=size))


def notes_on(batches: Sequence[RecordedBatch], given: bool) -> list[str]:
    """Return notes on what a recording lacks."""
    notes = []
    times = BatchTimes(batches)
    if not given:
        notes.append("the recorded inputs are not yours: give typical inputs with --inputs FILE")
    elif len(set(times.weights)) == 1:
        notes.append("all recorded inputs have the same length: the record says nothing about other lengths")
    if (error := times.error()) > POOR:
        hint = "more --repeats help, unless the times vary by chance"
        notes.append(f"the record predicts the time of a batch only to within {error:.0%}; {hint}")
    return notes


@contextmanager
def writing(path: Path | None) -> Iterator[list[RecordedBatch]]:
    """Yield a list for batches, and write them to a file when the block ends. Raises SettingError immediately if the file is unusable."""
    batches: list[RecordedBatch] = []
    if path is None:
        yield batches
        return
    try:
        file = path.open("ab")
    except OSError as exc:
        reason = f"cannot be written: {exc.strerror}"
        raise SettingError("--record", str(path), reason, "Name a file in an existing directory.") from None
    with file:
        yield batches
        if batches:
            file.truncate(0)
            file.write(b"".join(msgspec.json.encode(batch) + b"\n" for batch in batches))


MOST_ANSWERS = 5


class Run(msgspec.Struct, frozen=True):
    """A batch of the trial. `size` counts rows. An input without rows counts as one row."""

    size: int
    seconds: float


class Findings(msgspec.Struct):
    """Findings of a trial. Times are in seconds. `runs` are the batches that succeeded. `recorded` is empty if one of its
    batches failed. `answers` pairs some inputs with their outputs in the largest batch that ran. `cost` is fitted to the
    lengths or weights of inputs without rows. `weight` is the inputs' mean weight by the target's weight function; 0 if it
    has none. A target without `faults` is fit to serve. `unit` is `input`, or `row` if an input has several rows.
    Parameters in `per_call` have one value for a whole call."""

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
    """Fit a line to the median time of each size. A single slow run thus has little influence."""
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
    """Trial of one backend. It starts the backend; the caller must stop it.

    `choose` returns the inputs of the largest batch for the target's signature. `parameters` are JSON, or empty. `timeout`
    is for a batch, in seconds. `repeats` is the number of batches of each size. `limits` are the deadlines in ms by
    setting; the trial advises raising those that are too short. If the target breaks no rule, the batches that `record`
    returns are recorded. `weights` has the weights of the last batch's inputs; None if their lengths are their weights.
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
        # Sizes of the batches that failed, by reason and by whether user code raised. Each key becomes one fault.
        self._failures: dict[tuple[str, bool], list[int]] = {}
        self._bad_outputs: set[str | None] = set()  # Errors of outputs that have been added to the faults.
        self._overdue = False  # True if a batch missed the deadline. Larger batches are not tried then.

    async def run(self) -> Findings:
        """Run the whole trial. Raises TargetError if the target cannot be loaded, or its warm-up batch fails."""
        findings = self._findings
        try:
            findings.warm_up = await self._backend.start()
        except TargetError as exc:
            self._trace(exc)
            raise
        self._inputs, findings.per_call = self._choose(self._backend.signature), self._backend.signature.per_call
        if unseen := call_parameters.unseen(self._parameters, self._backend.signature.sees):
            reason = "its `together` does not name them" if findings.per_call else "it takes no parameters"
            findings.notes.append(f"the target does not see the parameters {', '.join(unseen)}: {reason}")
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
        full, single = last.get(len(self._inputs)), last[1]
        if full is not None and single is not None and _UNSTEADY not in findings.notes:
            self._check_alone(single[0], full)
            await self._check_order(full)
        if self._record is not None and not findings.faults and not self._failures:
            await self._record_times(self._record(self._backend.signature))
        await self._tell_failures()
        findings.model = _fitted(findings.runs)
        return findings

    async def _record_times(self, batches: Iterable[Sequence[Value]]) -> None:
        recorded = []
        for batch in batches:
            timed = await self._run_batch(batch)
            if timed is None or self._outputs(batch, timed[1]) is None:
                return
            recorded.append(RecordedBatch(self._weights_of(batch), timed[0]))
        self._findings.recorded = recorded

    def _weights_of(self, batch: Sequence[Value]) -> list[int]:
        return weights_of(batch) if self._weights is None else list(self._weights.latest)

    def _check_alone(self, single: Value, full: list[Value]) -> None:
        if single == full[0]:
            return
        if single in full:
            self._findings.fault(_DISORDER)
        else:
            self._findings.notes.append("an input has a different output alone than in a batch")

    async def _check_order(self, full: list[Value]) -> None:
        """Check that outputs follow their inputs when the largest batch is rotated by one place, and when its first two
        inputs are exchanged. These generate all permutations, so at least one exposes a target that rearranges outputs in a
        fixed way."""
        positions = list(range(len(full)))
        if len(set(full)) == 1 and len(set(self._inputs)) > 1:
            self._findings.notes.append(_IDENTICAL)
            return
        for order in (positions[1:] + positions[:1], positions[1::-1] + positions[2:]):
            outputs = await self._batch([self._inputs[position] for position in order])
            expected = [full[position] for position in order]
            if outputs is None or outputs == expected:
                continue
            if Counter(outputs) == Counter(expected):
                self._findings.fault(_DISORDER)
            elif _DEPENDS not in self._findings.notes:
                self._findings.notes.append(_DEPENDS)

    async def _batch(self, inputs: Sequence[Value]) -> list[Value] | None:
        """Run a batch and return its outputs. If an input has no output, add a fault and return None."""
        timed = await self._run_batch(inputs)
        if timed is None:
            return None
        run = Run(_rows(inputs), timed[0])
        self._findings.runs.append(run)
        self._findings.model.observe(run.size, run.seconds)
        return self._outputs(inputs, timed[1])

    async def _run_batch(self, inputs: Sequence[Value]) -> tuple[float, Sequence[ItemResult]] | None:
        """Run a batch; return its run time in seconds and its results. If it fails, record why and return None."""
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
        if self._findings.unit == "input" and (weights := self._weights_of(inputs)):
            self._findings.cost.observe(weights, seconds)
        return seconds, items

    def _entries(self, inputs: Sequence[Value]) -> list[Entry]:
        model, timeout, parameters = self._model, self._timeout, self._parameters
        return [Entry(new_id(), model, text, 0, "check", "check", timeout, timeout, parameters) for text in inputs]

    def _failed(self, size: int, error: BackendError) -> bool:
        """Record a failed batch. Return True if it is the first to fail for this reason."""
        sizes = self._failures.setdefault((str(error), isinstance(error, BatchRaised)), [])
        if size not in sizes:
            sizes.append(size)
        return sizes == [size]

    async def _tell_failures(self) -> None:
        for (reason, raised), failed in self._failures.items():
            batches = f"{'batches' if len(failed) > 1 else 'a batch'} of {joined(map(str, failed), 'and')}"
            hint = f". {_OTHER_INPUTS}" if raised and _rows(self._inputs[:1]) in failed else ""
            culprit = await self._culprit(reason) if raised else ""
            self._findings.fault(f"{batches} failed: {reason}{culprit}{hint}")

    async def _culprit(self, reason: str) -> str:
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
        """Describe a batch that missed its deadline. If the time of the largest batch is known, suggest settings for it."""
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
        """Add a fault for the first bad output of a batch. The others most likely have the same cause."""
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


_OTHER_INPUTS = "If it needs other inputs, give some with --input, or one as its attribute example."
_IDENTICAL = "all outputs are identical, so their order cannot be checked: try other inputs with --input"
_DISORDER = "outputs are not in the order of their inputs: return outputs[i] for inputs[i]"
_DEPENDS = "an input's output depends on the others in its batch, or on their order"
_UNSTEADY = "the outputs of the same batch differ from run to run, so their order cannot be checked"
