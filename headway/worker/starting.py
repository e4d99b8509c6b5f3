"""Starts a slot's backend: loads it, runs the warm-up batch, and checks that batches can meet their deadline.

A model that needs longer than `gpu_timeout` for one input would load but never answer, because each of its batches would be killed. Such a
model is refused. The first batch may be slow because it compiles kernels or fills caches, so a second batch decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from headway.core import deadlines
from headway.core.excerpt import excerpt
from headway.core.service_model import ServiceModel
from headway.errors import BackendError, BatchTimeout, TargetError
from headway.model import WARM_UP, Entry, Slot, Value
from headway.ports import Backend
from headway.runtime.logger import get_logger
from headway.runtime.race import TIDIES, end

log = get_logger(__name__)

_EXAMPLE = "give the target an attribute named example, with an input that it accepts"
_SIZES = "the remote model's metadata leave an axis beside the first free; name its size there, if it takes only one"


class Limits(msgspec.Struct, frozen=True):
    """Time limits in seconds, for running a batch, for a whole request, and for the wait until a request first runs. Limits
    that only other processes know are infinite. Bulk entries have a tier of at least `tiers`."""

    gpu_timeout: float
    request_timeout: float = math.inf
    queue_timeout: float = math.inf
    tiers: float = math.inf

    @property
    def longest(self) -> float:
        """Maximum seconds that a batch may take if its requests are to be answered."""
        return min(self.gpu_timeout, self.request_timeout)


class StartState(msgspec.Struct):
    """Attempts to start a slot's backend.

    Attributes:
        since: when the current attempt began; None if there is none.
        trouble: error message of the last attempt, or "" if it succeeded.
        cause: error message of the last batch, or "" if it succeeded.
        took: how many seconds the last successful start took.
        again_at: time of the next attempt after a failed one.
    """

    since: float | None = None
    trouble: str = ""
    cause: str = ""
    took: float = 0.0
    again_at: float = 0.0

    def seconds(self, now: float) -> float:
        """Return how many seconds the current attempt has taken so far, or 0 if there is none."""
        return now - self.since if self.since is not None else 0.0

    def retry_in(self, now: float) -> float:
        """Return the seconds until the next attempt after a failed one. 0 while an attempt is in progress."""
        return max(self.again_at - now, 0.0) if self.trouble and self.since is None else 0.0

    def reason(self, now: float, held: bool = False) -> str:
        """Return why the slot isn't up. `held` is True while an operator drains it; no backend is started then."""
        if self.since is None:
            again = "restarts once it is undrained" if held else "restarts"
            return self.trouble or (self._after(again) if self.cause else "")
        return self._after(f"has been loading for {self.seconds(now):.0f} s")

    def rests(self, seconds: float) -> str:
        """Return the reason why a slot is pausing. `seconds` is the pause that the remote API requested, or 0 if it requested none."""
        return self._after(
            f"rests for {seconds:.0f} s, as the API requested" if seconds else "rests after failed batches"
        )

    def _after(self, activity: str) -> str:
        error = self.trouble or self.cause
        return f"{activity}; the last error: {excerpt(error)}" if error else activity


def probe_entry(slot: Slot, value: Value, timeout: float) -> Entry:
    """Return an entry with a warm-up input, for testing a backend."""
    return Entry(WARM_UP, slot.model, value, 0, "", "", timeout, timeout)


async def start_all(starts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run these starts concurrently. If one fails, cancel the others, wait until they have finished, and raise its error."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await end(*tasks, tidies=TIDIES)
        raise


async def start(backend: Backend, slot: Slot, limits: Limits, clock: Callable[[], float], *, fresh: bool) -> bool:
    """Start a backend, and if it is `fresh`, check its speed. Return True if it logged that full batches take too long.
    Raises TargetError if the target doesn't load, fails its warm-up batch, or is too slow for its deadlines. The caller
    must stop the backend, even if this raises."""
    log.info("loading", worker=slot.worker)
    begun = clock()
    warm_up = await backend.start()
    further = dict(backend.warm_up)
    loaded = max(clock() - begun - warm_up - sum(further.values()), 0.0)
    again = await _again(backend, slot, limits, clock, warm_up, max(further.values(), default=0.0)) if fresh else None
    fields = {} if again is None else {"second_ms": round(again * 1000, 1)}
    if (full := further.get(slot.max_batch)) is not None:
        fields["full_batch_ms"] = round(full * 1000, 1)
    if warm_up:
        fields = {"warm_up_ms": round(warm_up * 1000, 1), **fields}
    log.info("loaded", worker=slot.worker, seconds=round(loaded, 2), **fields)
    if backend.signature.warm_up_input is None:
        log.warning(
            "starting without a warm-up batch, because no valid input is known",
            worker=slot.worker,
            takes=backend.signature.takes.value,
            hint=_EXAMPLE if backend.pid else _SIZES,
        )
    line = ServiceModel()
    line.warm_up(further.items())
    full = full or line.alpha + line.beta * slot.max_batch
    if too_long := fresh and full > limits.gpu_timeout:
        warn_of_full(slot, full, line, limits)
    elif (slowest := again or warm_up) > limits.queue_timeout and fresh:
        log.warning(
            "a batch takes longer than the queue deadline; requests that wait for one to finish will get 504",
            worker=slot.worker,
            batch_ms=round(slowest * 1000, 1),
            queue_timeout_ms=round(limits.queue_timeout * 1000, 1),
            hint=_mend(slowest, limits),
        )
    return too_long


def warn_of_full(slot: Slot, full: float, line: ServiceModel, limits: Limits) -> None:
    """Warn that a full batch takes `full` seconds, which exceeds the GPU deadline. `line` is the run time by batch size."""
    fits = int((limits.gpu_timeout - line.alpha) / line.beta) if line.beta > 0.0 else 0
    smaller = f"Start with --max-batch-size {fits}. Or: " if 0 < fits < slot.max_batch else ""
    log.warning(
        "full batches take longer than the GPU deadline, and will be killed; raise gpu_timeout_ms or lower max_batch_size",
        worker=slot.worker,
        size=slot.max_batch,
        full_batch_ms=round(full * 1000, 1),
        gpu_timeout_ms=round(limits.gpu_timeout * 1000, 1),
        hint=f"{smaller}{_mend(full, limits)}",
    )


async def _again(
    backend: Backend, slot: Slot, limits: Limits, clock: Callable[[], float], warm_up: float, full: float
) -> float | None:
    """Run a second batch of one input if the first, which took `warm_up` seconds, was too slow. Return how many seconds the
    second batch took, or None if it wasn't needed. `full` is the run time in seconds of the slowest larger batch, or 0."""
    if warm_up <= min(limits.longest, limits.queue_timeout):
        return None
    most, begun = limits.longest, clock()
    try:
        await backend.run([probe_entry(slot, backend.signature.warm_up_input or WARM_UP, most)], most)
    except BatchTimeout:
        raise too_slow(warm_up, limits, full) from None
    except BackendError as exc:
        raise TargetError(f"the second warm-up batch failed: {exc}", exc.trace) from None
    seconds = clock() - begun
    if seconds > most:
        raise too_slow(seconds, limits, full)
    return seconds


def too_slow(seconds: float, limits: Limits, full: float = 0.0) -> TargetError:
    """Return the error for a target that takes `seconds` for one input. `full` is the run time of the slowest batch, or 0 if unknown."""
    gpu, whole = limits.gpu_timeout, limits.request_timeout
    which = f"--gpu-timeout-ms {gpu * 1000:g}" if gpu <= whole else f"--request-timeout-ms {whole * 1000:g}"
    return TargetError(
        f"the target takes {seconds * 1000:.0f} ms for one input, longer than {which}: no request would be answered. "
        f"{_mend(max(seconds, full), limits)}"
    )


def _mend(seconds: float, limits: Limits) -> str:
    """Return advice on settings for batches that take this many seconds."""
    if seconds * 1000 >= deadlines.MOST_MS:
        return f"Make the model faster: no deadline may exceed {deadlines.MOST_MS} ms."
    others = {"queue_timeout_ms": limits.queue_timeout * 1000, "request_timeout_ms": limits.request_timeout * 1000}
    in_ms = {"gpu_timeout_ms": limits.gpu_timeout * 1000, **others}
    mend = f"Start with {deadlines.flags(seconds, in_ms)}, or make the model faster."
    if not math.isfinite(limits.request_timeout):
        own = {"queue_timeout_ms": 0.0, "request_timeout_ms": 0.0}
        mend += f" The gateways need at least {deadlines.flags(seconds, own)}."
    return mend
