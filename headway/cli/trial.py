"""Tries a target in batches of every size, judges it by the rules, and fits what a batch costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.core.service_model import ServiceModel
from headway.errors import BackendError, BatchTimeout, WorkerCrashed
from headway.gateway import new_id
from headway.model import Entry, Item
from headway.ports import Backend


@dataclass(frozen=True, slots=True)
class Run:
    """One batch: its size, and its run time in seconds."""

    size: int
    seconds: float


@dataclass(slots=True)
class Findings:
    """What the trial brought to light.

    Attributes:
        warm_up: run time of the warm-up batch, seconds.
        runs: the batches that came to an end.
        model: fitted to them.
        faults: rules that were broken; empty when the target is fit to serve.
        notes: worth knowing, not wrong.
    """

    warm_up: float = 0.0
    runs: list[Run] = field(default_factory=list)
    model: ServiceModel = field(default_factory=ServiceModel)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Add a fault, once."""
        if text not in self.faults:
            self.faults.append(text)


def sizes(most: int) -> list[int]:
    """The batch sizes that are tried: powers of two up to `most`, and `most`."""
    return [size for size in (1 << power for power in range(most.bit_length())) if size < most] + [most]


class Trial:
    """Runs batches on one backend, which it starts and leaves for its owner to stop.

    Arguments:
        backend: not started yet.
        inputs: what to send, one for each place of the largest batch.
        parameters: the same for every input; text of a JSON object, or empty.
        timeout: longest run of a batch, seconds.
        model: name the target is served under.
        repeats: batches of each size.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        backend: Backend,
        inputs: Sequence[str],
        parameters: bytes,
        timeout: float,
        model: str,
        repeats: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._parameters = parameters
        self._timeout = timeout
        self._model = model
        self._repeats = repeats
        self._clock = clock
        self._found = Findings()

    async def run(self) -> Findings:
        """Try everything.

        Raises:
            TargetError: the target cannot be loaded or fails its warm-up batch.
        """
        found = self._found
        found.warm_up = await self._backend.start()
        last: dict[int, list[str] | None] = {}
        for size in sizes(len(self._inputs)):
            for _ in range(self._repeats):
                outputs = await self._batch(self._inputs[:size])
                if outputs is None:
                    last[size] = None
                    break
                if last.get(size, outputs) != outputs and _UNSTEADY not in found.notes:
                    found.notes.append(_UNSTEADY)
                last[size] = outputs
        whole, single = last[len(self._inputs)], last[1]
        if whole is not None and _UNSTEADY not in found.notes:
            await self._check_order(whole)
            if single is not None and single[0] != whole[0]:
                found.notes.append("an input alone and the same input in a batch have different outputs")
        return found

    async def _check_order(self, whole: list[str]) -> None:
        """Send the largest batch backwards: every output must move with its input."""
        backwards = await self._batch(self._inputs[::-1])
        if backwards is None or len(whole) == 1:
            return
        backwards.reverse()
        if len(set(whole)) == 1 and len(set(self._inputs)) > 1:
            self._found.notes.append("all outputs are equal, so their order cannot be checked; try --input")
        elif backwards == whole:
            return
        elif Counter(backwards) == Counter(whole):
            place = next(index for index, (a, b) in enumerate(zip(whole, backwards, strict=True)) if a != b)
            self._found.fault(
                f"outputs are not in the order of their inputs: with the batch turned round, the output of input "
                f"{place + 1} is that of another. Return outputs[i] for inputs[i]."
            )
        else:
            self._found.notes.append("an input's output depends on the others in its batch, or on their order")

    async def _batch(self, inputs: Sequence[str]) -> list[str] | None:
        """The outputs of one batch; None when there is not one for each input, which is then among the findings."""
        entries = [
            Entry(new_id(), self._model, text, 0, "check", "check", self._timeout, self._timeout, self._parameters)
            for text in inputs
        ]
        begun = self._clock()
        try:
            items = await self._backend.run(entries, self._timeout)
        except BackendError as exc:
            self._found.fault(f"a batch of {len(inputs)} failed: {exc}")
            if isinstance(exc, WorkerCrashed | BatchTimeout):
                await self._backend.start()
            return None
        run = Run(len(inputs), self._clock() - begun)
        self._found.runs.append(run)
        self._found.model.observe(run.size, run.seconds)
        return self._outputs(items)

    def _outputs(self, items: Sequence[Item]) -> list[str] | None:
        outputs: list[str] = []
        for place, item in enumerate(items):
            if item.output is not None:
                outputs.append(item.output)
            elif item.fault:
                self._found.fault(f"input {place + 1} of {len(items)}: {item.error}")
            else:
                self._found.fault(
                    f"the target rejects input {place + 1} of {len(items)}, {self._inputs[place][:40]!r}: {item.error}. "
                    "If it asks for inputs of another kind, give some with --input."
                )
        return outputs if len(outputs) == len(items) else None


_UNSTEADY = "the same batch has different outputs from run to run, so their order cannot be checked"
