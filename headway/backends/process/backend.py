"""A GPU worker: a child process that runs the user's function, one batch at a time.

    stopped ──start()──▶ ready ──run()──▶ busy ──answer──▶ ready ──stop()──▶ stopped
       ▲                   │               │
       └───────────────────┴── it dies, hangs past its deadline, or its run is cancelled: kill it, start() again

A child is killed once nobody is waiting for its batch: a late answer could be mistaken for the answer to a later batch.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec

from headway.backends.process.arena import LARGE, Arena, Count, place_inputs, take_outputs
from headway.backends.process.child_process import Child, ChildProcess, Log, Message
from headway.backends.process.frames import MAX_FRAME, Build, Failed, NoFrame, Outputs, Ready, Run, TargetRefused
from headway.backends.process.group_guard import GroupGuard
from headway.config.target import FileTarget, ModuleTarget
from headway.core import values
from headway.core.service_model import WarmUpRun, measured, next_size
from headway.core.tensors import NoTensors, header_of, opening_of, specs_of
from headway.core.weight_estimate import WeightEstimate, octets
from headway.errors import (
    BackendError,
    BadOutput,
    BatchRaised,
    BatchTimeout,
    StartKilled,
    TargetError,
    WorkerAbsent,
    WorkerCrashed,
)
from headway.model import KIND, MOST_TOKENS, Entry, ItemResult, Octets, Signature, Tensors, TensorSpec, Value, ValueKind
from headway.runtime.spans import RUN

STOP_GRACE = 5.0  # Seconds that an idle child may take to exit after its pipe was closed.
REAP_LIMIT = 10.0  # Seconds to wait for a killed child to end. If it takes longer, the child is reaped later.
TURN = 1 << 20  # Bytes of large values to copy or read in one turn of the event loop. Single values aren't divided.
HAND_OVER_SECONDS, HAND_OVER_RATE = 3.0, 16 << 20
"""Extra time after the batch's deadline to hand over outputs: a number of seconds, plus a second for each HAND_OVER_RATE bytes."""
_CALLER = attrgetter("tenant", "caller")
_CHECK_EVERY = 1.0  # Seconds between two checks of the child's memory.
_MOST_SHOWN = 200

_encode = msgspec.msgpack.Encoder().encode

Spawn = Callable[[Sequence[str], Mapping[str, str], str, Log, GroupGuard | None, int], Child]  # See `ChildProcess`.


class ProcessBackend:
    """Backend of one slot with a child process.

    Arguments:
        spec: target that the child loads.
        worker: the worker's name in logs and errors, for example `gpu-0`.
        device: CUDA_VISIBLE_DEVICES of the child, or `cpu` to hide all GPUs.
        start_timeout: seconds for loading, setup and all warm-up batches in total.
        max_batch: size of the largest warm-up batch, or 0 to run only one input.
        max_rows: limit on rows in one call of a target that takes arrays, or 0 for none.
        recycle_rss_bytes: memory use in bytes above which the child is replaced, or 0 for never.
        arena_bytes: size of the memory that is shared with the child for large values, or 0 for none.
        cuts: True to allow several calls for a batch if that saves time.
        tiers: number of tiers. Entries whose tier is at least this number are bulk lines, which come last in their batch.
    """

    def __init__(
        self,
        spec: ModuleTarget | FileTarget,
        *,
        worker: str,
        device: str,
        start_timeout: float,
        max_batch: int = 0,
        max_rows: int = 0,
        recycle_rss_bytes: int = 0,
        log: Log,
        guard: GroupGuard | None = None,
        weights: WeightEstimate | None = None,
        spawn: Spawn = ChildProcess,
        arena_bytes: int = 0,
        count: Count = lambda direction, by_arena: None,
        cuts: bool = True,
        tiers: float = math.inf,
    ) -> None:
        self._spawn, self._arena_bytes, self._count = spawn, arena_bytes, count
        self._spec, self._worker, self._device = spec, worker, device
        self._start_timeout = start_timeout
        self._max_batch, self._warm_up_runs = max_batch, list[WarmUpRun]()
        self._max_rows, self._cuts, self._tiers = max_rows, cuts, tiers
        self._recycle_rss = recycle_rss_bytes
        self._log, self._guard = log, guard
        self._weights = weights
        self._child: Child | None = None
        self.source = ""
        self._signature = Signature()
        self._number = 0
        self._busy = False
        self._check_at = 0.0
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The child's process id, or 0 if there is no child. If the child dies, its id stays until `stop`."""
        return 0 if self._child is None else self._child.pid

    @property
    def signature(self) -> Signature:
        if self._weights is None:
            return self._signature
        return msgspec.structs.replace(self._signature, weight=self._weights.line)

    @property
    def warm_up(self) -> Sequence[WarmUpRun]:
        return measured(self._warm_up_runs)

    async def start(self) -> float:
        """Stop any previous child, start a new one, load the target, and run warm-up batches. The first is a batch of one
        input; return its run time in seconds, or 0 if no input is known. `core.service_model` chooses the other batches.

        A target may reject the warm-up input by returning an exception, but not by raising one. Raises TargetError if a
        step fails, or all steps take longer than `start_timeout` seconds; no process is then left running."""
        await self.stop()
        spec = self._spec
        place = ["module", spec.module] if isinstance(spec, ModuleTarget) else ["file", str(spec.path)]
        arguments, environment = [*place, spec.attribute], self._environment()
        child = self._child = self._spawn(
            arguments, environment, self._worker, self._log, self._guard, self._arena_bytes
        )
        ready = False
        try:
            seconds = await self._prepare(child)
            ready = True
        finally:
            if not ready:
                child.dismissed = not child.doomed  # The error already says why it ends.
                child.kill("did not become ready")
                await self._reap(child)
        if self._recycle_rss:
            self._check_at = asyncio.get_running_loop().time()
            self._tick()
        return seconds

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Run a batch. If cancelled, or after `timeout` seconds, kill the child. While it is
        handing over outputs, it gets more time.

        Raises:
            BatchRaised: user code raised.
            BadOutput: user code didn't return a list of the right length.
            BatchTimeout: no answer came within `timeout` seconds, or large outputs weren't handed over in time.
            WorkerCrashed: the child died.
            WorkerAbsent: the child was already gone.
        """
        child = self._child
        if child is None or child.doomed:
            raise WorkerAbsent(f"worker {self._worker} has no process; it must be started")
        if self._busy:
            raise RuntimeError(f"worker {self._worker} was given a batch while it was running one")
        parameters = [entry.parameters for entry in entries] if self._signature.sees else None
        arena, content = child.arena, b""
        self._busy = True
        try:
            lines = sum(entry.tier >= self._tiers for entry in entries) if entries[-1].tier >= self._tiers else 0
            mixed = len(set(map(_CALLER, entries))) > 1
            batch, content = await self._pack(arena, [entry.input for entry in entries], parameters, lines, mixed=mixed)
            if child.doomed:  # It was doomed during the last await.
                raise WorkerAbsent(f"worker {self._worker} has no process; it must be started")
            word = await self._answer(child, content, timeout)
            content = b""  # It may be large, so free it.
            items = await self._items(child, arena, batch, word)
        finally:
            self._busy = False
            del content
        if self._weights is not None:
            self._observe_weights(self._weights, [entry.input for entry in entries], word)
        if self._ticker is not None:
            self._check_limits()
        return items

    @property
    def ended(self) -> str:
        """Why the child ended; empty while it lives."""
        return self._child.cause if self._child is not None else ""

    async def gone(self) -> None:
        """Return once the child has died, or uses too much memory between batches."""
        if (child := self._child) is not None:
            await child.gone.wait()
            if child.doomed and not child.dismissed:  # The cause is known once it has been reaped.
                await self._reap(child)

    async def stop(self) -> None:
        """End the child and reap it, and kill its descendants. An idle child may exit on its own first."""
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        child = self._child
        if child is None:
            return
        if child.doomed and not child.dismissed:  # It is ending anyway, and the log will say how.
            await self._end(child)
            return
        child.dismissed = True
        if not self._busy and not child.doomed:
            child.hang_up()
            try:
                async with asyncio.timeout(STOP_GRACE):
                    await child.ended.wait()
            except TimeoutError:
                self._log.warning("worker process must be killed to end", worker=self._worker, pid=child.pid)
            finally:
                child.kill("did not exit when asked to")
        child.kill("was stopped")
        await self._end(child)

    async def _end(self, child: Child) -> None:
        await self._reap(child)
        if self._child is child:
            self._child = None

    async def _reap(self, child: Child) -> None:
        try:
            async with asyncio.timeout(REAP_LIMIT):
                await child.ended.wait()
        except TimeoutError:
            self._log.warning("worker process was killed but does not end", worker=self._worker, pid=child.pid)

    async def _prepare(self, child: Child) -> float:
        runs = self._warm_up_runs = []
        size: int | None = None
        self._busy = True
        try:
            async with asyncio.timeout(self._start_timeout):
                folder = self._spec.folder if isinstance(self._spec, ModuleTarget) else ""
                function, most = ("", 0) if self._weights is None else (self._weights.function, self._weights.most)
                build = Build(self._spec.arguments, folder, function, most, self._max_rows, not self._cuts)
                word = await child.ask(_encode(build))
                if isinstance(word, TargetRefused):
                    raise TargetError(word.message, word.trace)
                if not isinstance(word, Ready):
                    raise ChildProcessError("sent a message before it was ready")
                self.source = word.source
                self._signature = _signature(word)
                value = self._signature.warm_up_input
                while value is not None and (size := next_size(runs, max(self._max_batch, 1))) is not None:
                    runs.append((size, await self._run_warm_up(child, value, size)))
                    if not self._max_batch:
                        break
        except TimeoutError:
            raise TargetError(
                f"target {self._spec}: worker {self._worker} was not ready within {self._start_timeout:g} s. "
                "Make it load faster, or raise start_timeout_ms."
            ) from None
        except ChildProcessError as end:
            kind = StartKilled if child.killed_by_others else TargetError
            hint = (
                f" in a warm-up batch of {size}. If it can take fewer inputs, lower max_batch_size"
                if size and size > 1
                else ""
            )
            raise kind(f"target {self._spec}: while worker {self._worker} started, its process {end}{hint}.") from None
        finally:
            self._busy = False
        return runs[0][1] if runs else 0.0

    async def _run_warm_up(self, child: Child, value: Value, size: int) -> float:
        begun = time.monotonic()
        shown = values.shown(value)[:_MOST_SHOWN]
        batch_shown = f"the warm-up batch {[shown]}" if size == 1 else f"a warm-up batch of {size} times {shown!r}"
        try:
            arena = child.arena
            batch, content = await self._pack(arena, [value] * size, None)
            word = await child.ask(content)
            items = await self._items(child, arena, batch, word)
            if self._weights is not None:
                self._observe_weights(self._weights, [value] * size, word)
        except BackendError as exc:
            hint = _hint(str(exc), size, self._signature) if isinstance(exc, BatchRaised) else ""
            raise TargetError(f"target {self._spec}: {batch_shown} failed: {exc}.{hint}", exc.trace) from None
        fault = next((item.error for item in items if item.fault), None)
        if fault is not None:
            raise TargetError(f"target {self._spec}: {batch_shown} failed: {fault}.")
        if isinstance(output := items[0].output, Tensors) and not self._signature.outputs:
            self._signature = msgspec.structs.replace(self._signature, outputs=_seen(output, self._signature))
        return time.monotonic() - begun

    async def _answer(self, child: Child, content: bytes, timeout: float) -> Message:
        waiter = child.ask(content)
        self._deadline = asyncio.get_running_loop().call_later(timeout, self._overdue, child, waiter, timeout)
        try:
            return await waiter
        except ChildProcessError as end:
            raise WorkerCrashed(
                f"worker {self._worker}: its process {end}", f"the worker's process {child.cause}"
            ) from None
        finally:
            self._deadline.cancel()
            if waiter.cancelled():
                child.kill("was killed with the run that was cancelled")
            del waiter  # Its exception's traceback holds this frame.

    def _overdue(self, child: Child, waiter: asyncio.Future[Message], timeout: float) -> None:
        """Kill a child whose batch has run too long. If it has begun to hand over outputs, give it more time first."""
        child.catch_up()
        if waiter.done():
            return
        if size := child.handing_over:
            seconds = HAND_OVER_SECONDS + size / HAND_OVER_RATE
            late = f"did not hand over its outputs of {size} bytes within {seconds:.1f} s"
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._too_late, child, waiter, late)
        else:
            self._too_late(child, waiter, f"took longer than the GPU deadline of {timeout * 1000:g} ms")

    def _too_late(self, child: Child, waiter: asyncio.Future[Message], late: str) -> None:
        child.catch_up()
        if not waiter.done():
            child.kill(f"was killed, its batch {late}")
            waiter.set_exception(
                BatchTimeout(f"worker {self._worker}: its batch {late}; it was killed", f"the model {late}")
            )

    async def _items(self, child: Child, arena: Arena | None, batch: Run, word: Message) -> list[ItemResult]:
        """Return the results in the child's answer to a batch. Kill the child if it sent anything else."""
        if isinstance(word, Failed | Outputs):
            if word.keeps:
                self._leave_arena(child)
            if (trace := RUN.get()) is not None:
                trace.ran(word.begun, word.ended)
        if isinstance(word, Failed):
            if word.bad_output:
                raise BadOutput(word.message, trace=word.trace)
            count = len(batch.inputs)
            places = {place for place in word.places if 0 <= place < count}
            raise BatchRaised(word.message, trace=word.trace, places=sorted(places) if len(places) < count else ())
        try:
            if not isinstance(word, Outputs) or word.number != batch.number:
                raise NoFrame("a message about something else")
            if len(word.outputs) != len(batch.inputs) or not word.are_of_kind:
                raise NoFrame("other outputs than requested")
            if word.placed or word.unplaced:
                await _in_turns(take_outputs(arena, batch, word, self._count))
            items = _results(word)
        except (NoFrame, NoTensors, msgspec.DecodeError):
            child.kill("sent a wrong answer")
            odd = "process sent a wrong answer"
            raise WorkerCrashed(f"worker {self._worker}: its {odd}", f"the worker's {odd}") from None
        for position, (error, fault) in word.errors.items():
            items[position] = ItemResult(None, error, fault)
        requests = len(items) - batch.lines
        for position, size in word.crowded.items():
            items[position] = ItemResult(None, left_out=size) if position < requests else ItemResult(None, crowded=True)
        if word.tokens:
            for position, used in word.tokens.items():  # User code may have made them up.
                if 0 <= position < len(items) and 0 <= used.prompt <= used.used <= MOST_TOKENS:
                    items[position] = msgspec.structs.replace(items[position], tokens=used)
        if word.cost is not None:
            self._signature = msgspec.structs.replace(self._signature, cost=word.cost)
        return items

    def _leave_arena(self, child: Child) -> None:
        """Stop using a child's arena, because user code still holds views of it."""
        if child.arena is not None:
            child.arena = None
            self._log.warning(
                "the target keeps views of its inputs; large values go through the pipe until its process is replaced. "
                "Copy what must outlive a batch, for example with array.copy(), or annotate the inputs as list[bytes]",
                worker=self._worker,
                pid=child.pid,
            )

    def _observe_weights(self, weights: WeightEstimate, inputs: Sequence[Value], word: Message) -> None:
        measured_weights = word.weights if isinstance(word, Outputs) else []
        known = [(octets(value), weight) for value, weight in zip(inputs, measured_weights, strict=False) if weight]
        if known:
            weights.observe([length for length, _ in known], [weight for _, weight in known])

    async def _pack(
        self,
        arena: Arena | None,
        inputs: list[Value],
        parameters: list[bytes] | None,
        lines: int = 0,
        *,
        mixed: bool = False,
    ) -> tuple[Run, bytes]:
        """Return a batch and its frame. Large inputs go into the arena. The last `lines` inputs are bulk lines."""
        self._number += 1
        batch = Run(self._number, [*inputs], parameters, lines=lines, mixed=mixed)
        batch.share_parameters()
        try:
            if arena is not None and max(map(len, inputs)) >= LARGE:
                await _in_turns(place_inputs(arena, batch, self._count))
            content = _encode(batch)
        except UnicodeEncodeError as exc:
            raise BatchRaised(f"an input is not valid Unicode text: {exc}") from None
        if len(content) > MAX_FRAME:
            raise BatchRaised(f"the inputs have {len(content)} bytes together, but the limit is {MAX_FRAME}")
        return batch, content

    def _environment(self) -> dict[str, str]:
        """Return this process's environment without Headway's settings, some of which are secret."""
        environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("HEADWAY_")}
        environment["CUDA_VISIBLE_DEVICES"] = "" if self._device == "cpu" else self._device
        return environment

    def _tick(self) -> None:
        self._check_limits()
        self._ticker = asyncio.get_running_loop().call_later(_CHECK_EVERY, self._tick)

    def _check_limits(self) -> None:
        """Have the child replaced if it uses too much memory. Checks at most once a second, and not during a batch."""
        child, now = self._child, asyncio.get_running_loop().time()
        if child is None or self._busy or now < self._check_at or child.gone.is_set():
            return
        self._check_at = now + _CHECK_EVERY * 0.9
        resident = child.resident_bytes()
        if resident > self._recycle_rss:
            event = "worker uses too much memory, replacing it"
            self._log.info(event, worker=self._worker, pid=child.pid, rss_bytes=resident)
            child.gone.set()


async def _in_turns(steps: Iterator[int]) -> None:
    """Run steps that yield their size in bytes. After every TURN bytes, other tasks get a turn."""
    room = TURN
    for size in steps:
        room -= size
        if room <= 0:
            room = TURN
            await asyncio.sleep(0)


def _results(word: Outputs) -> list[ItemResult]:
    """Return the results in an answer. Raises DecodeError for bad JSON, and NoFrame or NoTensors for bad tensors."""
    outputs = word.outputs
    if word.kind is ValueKind.TEXT:
        return [ItemResult(output) for output in outputs]
    if word.kind is ValueKind.TENSORS:
        openings = {
            opening_of(output) or output for output in outputs if output is not None
        }  # Most outputs have the same opening.
        if not all(header_of(Octets(opening)).rows for opening in openings):
            raise NoFrame("tensors without rows")
    read = values.of_json if word.kind is ValueKind.JSON else KIND[word.kind].of
    return [ItemResult(None if output is None else read(output)) for output in outputs]


_TAKEN_FOR_DICT = re.compile(
    r"AttributeError: 'list' object has no attribute '(get|items|keys|values|setdefault)'|TypeError: list indices must be .*, not str"
)


def _hint(raised: str, size: int, signature: Signature) -> str:
    """Return a hint about an exception in a warm-up batch of this size, or "" if the exception says enough."""
    if size > 1:
        return " If it can take fewer inputs at a time, lower max_batch_size."
    if signature.sees and raised.startswith("KeyError: "):
        return " A warm-up batch has no parameters, and a request may have none: use .get() for parameters that may be missing."
    if signature.sees and _TAKEN_FOR_DICT.match(raised):
        mapping = (
            "; to get one mapping for the call, write parameters: Mapping[str, object]" if signature.per_call else ""
        )
        return f" Its arguments are lists, and parameters has one object for each input{mapping}."
    if signature.example is None:
        return f" {_LIST} If it does but cannot take this text, set its attribute example to an input that it can take."
    return ""


_LIST = "A target gets a list of inputs and returns a list of outputs."


def _seen(output: Tensors, signature: Signature) -> tuple[TensorSpec, ...]:
    """Return the specifications of the first output. If inputs have free axes, all axes of the output count as free."""
    specs = specs_of(output)
    if any(-1 in spec.shape for spec in signature.inputs):
        specs = tuple(TensorSpec(spec.name, spec.datatype, (-1,) * len(spec.shape)) for spec in specs)
    return specs


def _signature(ready: Ready) -> Signature:
    example: Value | None = None
    if ready.example is not None:
        example = Tensors(ready.example) if ready.takes is ValueKind.TENSORS else values.of_json(ready.example)
    return Signature(
        ready.takes,
        ready.gives,
        example,
        inputs=ready.inputs,
        outputs=ready.outputs,
        together=ready.together,
        sees=ready.sees,
        per_call=ready.per_call,
    )
