"""The batcher: one loop for each GPU that claims a batch, runs it, and hands in its outcome.

    start ──ready──▶ claim ◀──────────────┐
      ▲                │ lease            │
      │                ▼                  │
      │   crashed    run ──outputs──▶ complete
      │   or hung      │
      └──── release ◀──┘ failed
            (retry plan)

Nothing decides here when a batch leaves or who rides: the broker does, at the claim. A slot counts as capacity
only while it is healthy: its backend is up, warm, and its breaker closed.

A slot whose GPU is lost stays out: what it runs is given back, its backend is ended, and no other is started.

A slot that an operator drains (`hold`) claims nothing until he ends that, and starts no backend; it says so from the middle
of its last batch on.

While the broker is out of reach nothing is claimed, and what came of the batch that was running is told as soon as
it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from headway.core.breaker import Breaker, State
from headway.core.departure import RETRY, Policy
from headway.core.health import HEARTBEAT_EVERY, REST_AFTER, REST_EVERY
from headway.core.retry import NEVER_SPLIT, RestartPauses, backoff
from headway.errors import (
    BackendError,
    BadOutput,
    BatchRaised,
    BatchTimeout,
    BrokerUnavailable,
    HeadwayError,
    RemoteAbsent,
    StartKilled,
    TargetError,
    WorkerAbsent,
    WorkerCrashed,
)
from headway.model import (
    BatchFailure,
    Cause,
    ItemResult,
    Lease,
    ModelReport,
    NoWork,
    Signature,
    Slot,
    ValueKind,
    WorkerStatus,
)
from headway.model.board import GIVEN_BACK
from headway.ports import Backend, Gpu, WorkSource
from headway.runtime.availability import Availability
from headway.runtime.counters import WorkerCounts
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor
from headway.runtime.ticks import until_tick
from headway.worker.batch_traces import BatchTraces
from headway.worker.failure_log import FailureLog
from headway.worker.helping import Claims
from headway.worker.lease_keeper import LeaseKeeper
from headway.worker.slot_figures import RunCounts, SlotFigures
from headway.worker.starting import Limits, StartState, probe_entry, start, warn_of_full

log = get_logger(__name__)

PROBE_EVERY = 0.05
"""Seconds between two looks at a breaker that another slot probes."""
CHECK_BREAKER_EVERY = 1.0
"""Most seconds between two looks at an open breaker, as another slot's success may have closed it."""
IN_DOUBT = 0.5
"""Seconds for which a slot that waits for another's first probe still counts as healthy, as the probe mostly passes."""
PROBE_GRACE = 15.0
"""Seconds beyond the longest run after which a probe that was never heard of again is given up."""
BY_OPERATOR = "by an operator"
"""Reason for which a slot is drained."""
TELLING = 3
"""Batches from which on their times tell something of full ones; a few may have been held up."""
LEAST_TIME_LEFT = 1.0
"""Least seconds for which the outcome of a batch is offered again to a broker out of reach.

Members that ride with the first to give up may have more time.
"""

T = TypeVar("T")


class Batcher:
    """Batcher of one slot.

    Arguments:
        slot: the slot.
        make_backend: builds a backend that is not started yet.
        broker: broker that batches come from.
        policy: departure policy.
        breaker: breaker of the backend; slots of one remote API share it.
        limits: limits of a run.
        counters: counts of the workers.
        clock: monotonic seconds.
        rng: uniform in [0, 1), for pauses.
        memory: reads the share in use of the memory that the slot lives in. While memory is scarce the slot goes on,
            but does not count as capacity.
        gpu: its GPU, whose memory counts likewise; None where it has none that can be watched.
        failure_log: log of failed batches, which the slots of a process share.
        started: hears of each start of a backend: its seconds, or the text of the error with which it failed.
        traces: recorder of the spans of batches; None where none are recorded.
        read_report: reads the report on the model anew before each start of a backend; None where it stays that of the slot.

    Attributes:
        starting: state of the starts of its backend.
        figures: figures that the heartbeats tell.
        claims: claims of the slot.
        lost: why its GPU is lost, in words; empty while it is not.
        held: whether an operator has drained it.
    """

    def __init__(
        self,
        slot: Slot,
        make_backend: Callable[[], Backend],
        broker: WorkSource,
        policy: Policy,
        breaker: Breaker,
        limits: Limits,
        counters: WorkerCounts,
        clock: Callable[[], float],
        *,
        rng: Callable[[], float] = random.random,
        memory: Callable[[], float] = lambda: 0.0,
        gpu: Gpu | None = None,
        failure_log: FailureLog | None = None,
        started: Callable[[float | str], None] = lambda told: None,
        traces: BatchTraces | None = None,
        read_report: Callable[[], Awaitable[ModelReport]] | None = None,
    ) -> None:
        self.slot = slot
        self._read_report, self._report = read_report, slot.runs
        self._max_weight = slot.max_weight
        self._started = started
        self.starting = StartState()
        self._failure_log = failure_log or FailureLog(limits.gpu_timeout)
        self._make_backend, self._broker = make_backend, broker
        self.claims = Claims(slot, broker, policy, clock, traces)
        self._breaker, self._limits, self._counters = breaker, limits, counters
        self._clock, self._rng = clock, rng
        self._availability = Availability(slot.worker, clock)
        self._unanswered = 0
        self._backend: Backend | None = None
        self._status = WorkerStatus.STARTING
        self._fresh: Backend | None = None
        self._pausing: asyncio.Future[object] | None = None
        self._retire = False
        self._kept_out_since: float | None = None
        self._pauses = RestartPauses()
        self._up_since = 0.0
        self._asked = self._winding_down = self._interrupted = self._rests_held = self._warned_of_full = False
        self._restarts = -1
        self._keeper = LeaseKeeper(broker, clock)
        self._running_since: float | None = None
        self._stirred_at = clock()
        """Instant of the last change of the status, or the end of the last batch."""
        self.figures = SlotFigures(slot, memory, gpu)
        self.lost = ""
        self.held = False
        self._ending: asyncio.Task[None] | None = None
        """End of a backend whose GPU was lost in the middle of a batch."""
        self._counts = RunCounts(slot, counters, self.figures, limits.tiers)

    @property
    def signature(self) -> Signature | None:
        """Signature of the target; None while none is loaded."""
        return self._backend.signature if self._backend is not None else None

    async def start(self) -> None:
        """Start the backend.

        Raises:
            TargetError: the target cannot be loaded, fails its warm-up batch, or is too slow.
        """
        await self._become(WorkerStatus.STARTING)
        fresh, self._fresh = self._fresh, None
        self._backend = fresh or await self._started_backend(fresh=self._restarts < 0)
        self.slot = self.claims.slot = self._bounded(self._backend.signature)
        if fresh is None:
            self.figures.runs = self._report
        self._restarts += 1
        self._counters.restarts[self.slot.worker] = self._restarts
        self.figures.pace.warmed(self._backend.warm_up)
        self.figures.loaded()
        await self._become(WorkerStatus.HEALTHY)

    def run(self, supervisor: Supervisor) -> asyncio.Task[None]:
        """Start serving and sending heartbeats; returns the task that ends when the slot has wound down."""
        supervisor.start(f"heartbeat of {self.slot.worker}", self._heartbeat_on)
        supervisor.start(f"lease of {self.slot.worker}", self._keeper.renew_on)
        return supervisor.start(f"batcher of {self.slot.worker}", self._serve)

    def wind_down(self) -> None:
        """Claim no more; the loop ends after the batch that runs now."""
        self._winding_down = True
        self._interrupt()

    async def hold(self, held: bool) -> None:
        """Claim no more from now on, or claim again, and tell the fleet. A start that goes on ends first."""
        if held is self.held or self._winding_down:
            return
        self.held = held
        log.info("worker is drained" if held else "worker is no longer drained", worker=self.slot.worker)
        if self._backend is not None or self._rests_held:
            self._interrupt()
        await self._become(self._status)

    async def replace(self) -> None:
        """Swap the backend for a fresh one, which must be ready first. A slot whose GPU is lost has none, and gets none.

        Raises:
            TargetError: the fresh backend does not start; the present one goes on.
        """
        if self.lost:
            return
        fresh = await self._started_backend(fresh=True)
        if self._fresh is not None:
            await self._fresh.stop()
        self._fresh = fresh
        self._retire = True
        self._interrupt()

    async def tell_report(self) -> None:
        """Tell the fleet what the slot runs since its backend was replaced: no batch begins on another one from now on."""
        if self.figures.runs != self._report:
            self.figures.runs = self._report
            await self._heartbeat()

    async def stop(self) -> None:
        """Stop the backend. The fleet is told once that the slot is gone, or as soon as it can be told while the loops run."""
        for backend in (self._backend, self._fresh):
            if backend is not None:
                await backend.stop()
        self._backend = self._fresh = None
        self._keeper.end()
        if self._status is not WorkerStatus.OFFLINE:
            await self._become(WorkerStatus.OFFLINE)

    async def _serve(self) -> None:
        while not self._winding_down:
            if self.lost:
                await self._stay_out()
            elif self._backend is None and self.held:
                await self._rest_held()
            elif self._backend is None and (pause := await self._try_to_start()):
                await self._idle(asyncio.sleep(pause))
            elif self._backend is not None:
                await self._serve_until_gone(self._backend)
                await self._pause_after_idle_death()

    async def _stay_out(self) -> None:
        """End the backend, and wait until the slot winds down."""
        while self._backend is not None or self._fresh is not None:
            await self._swap()
        if not self._winding_down:
            await self._idle(asyncio.Event().wait())

    async def _rest_held(self) -> None:
        """Wait until somebody has ended the drain, or the backend is gone. The fleet hears that no batch runs any more."""
        self._interrupted, self._rests_held = False, True
        try:
            await self._heartbeat()
            if not self._interrupted:
                await self._idle(asyncio.Event().wait())
        finally:
            self._rests_held = False

    async def _try_to_start(self) -> float:
        """Start the backend. Returns the seconds to wait before the next attempt if that failed, else 0."""
        try:
            await self._idle(self.start())
        except (HeadwayError, OSError) as exc:
            pause = self._pauses.start_failed(isinstance(exc, StartKilled))
            self.starting.again_at = self._clock() + pause
            log.error("worker does not start", worker=self.slot.worker, error=str(exc), retry_in=pause)
            return pause
        return 0.0

    async def _pause_after_idle_death(self) -> None:
        """Wait before a backend that was never given anything is replaced, if that happens again and again."""
        if self._asked or self._winding_down or self._backend is not None:
            return
        pause = self._pauses.died_idle(self._clock() - self._up_since)
        if pause:
            log.warning("worker dies again and again without a batch", worker=self.slot.worker, retry_in=pause)
            await self._idle(asyncio.sleep(pause))

    async def _serve_until_gone(self, backend: Backend) -> None:
        """Serve batches until the backend has died, wants to be replaced, or the slot winds down."""
        self._up_since, self._asked = self._clock(), False
        gone = asyncio.ensure_future(backend.gone())
        # Once the next backend is starting, news of this one must not interrupt it.
        gone.add_done_callback(lambda _: self._interrupt() if self._backend is backend else None)
        self._retire = self._fresh is not None  # It may have come while this one was starting.
        try:
            while not self._winding_down and not gone.done() and not self._retire:
                await (self._rest_held() if self.held else self._serve_one(backend, gone))
        finally:
            gone.cancel()
            if not self._winding_down:
                await self._swap()

    async def _serve_one(self, backend: Backend, gone: asyncio.Future[None]) -> None:
        now = self._clock()
        if not self._breaker.allow(now, self._limits.gpu_timeout + PROBE_GRACE):
            await self._keep_out(now)
            return
        self._kept_out_since = None
        if self._breaker.state(now) is not State.CLOSED:
            await self._probe(backend)
            return
        if self._status is WorkerStatus.DEGRADED:
            await self._become(WorkerStatus.HEALTHY)
        lease = await self._claimed()
        if lease is None:
            return
        rests = self._breaker.state(self._clock()) is State.OPEN
        if self._winding_down or self.held or self._retire or rests or gone.done():  # It came to that during the call.
            await self._tell(lease, lambda: self._broker.release(lease), self._clock())
        else:
            await self._run(backend, lease)

    async def _keep_out(self, now: float) -> None:
        """Wait until the breaker is worth asking again. A slot that may not run is not healthy."""
        since = self._kept_out_since = now if self._kept_out_since is None else self._kept_out_since
        barred = self._breaker.state(now) is State.OPEN or now - since >= IN_DOUBT
        if barred and self._status is not WorkerStatus.DEGRADED:
            await self._become(WorkerStatus.DEGRADED)
        pause = min(max(self._breaker.retry_at(now) - now, PROBE_EVERY), CHECK_BREAKER_EVERY)
        await self._idle(asyncio.sleep(pause))

    async def _claimed(self) -> Lease | None:
        """Claim the batch that leaves now; None when it is worth asking again."""
        self._interrupted = False  # An interrupt of the call finds no pause to cancel.
        try:
            claimed = await self.claims.claim()
            await self._reached()
            if isinstance(claimed, NoWork) and not self._interrupted:
                await self._idle(self.claims.wait(claimed.until))
        except BrokerUnavailable as error:
            self._availability.failed(self._clock(), error)
            self._unanswered += 1
            await self._idle(asyncio.sleep(backoff(self._unanswered, self._rng())))
            return None
        self._unanswered = 0
        return claimed if isinstance(claimed, Lease) else None

    async def _probe(self, backend: Backend) -> None:
        """Find out by the warm-up input whether the backend works: what failed may have failed for its inputs."""
        slot, timeout = self.slot, self._limits.gpu_timeout
        self._asked = True
        if (value := backend.signature.warm_up_input) is None:  # Then a fresh process that starts has to do.
            self._breaker.success(self._clock())
            self._retire = True
            await self._become(WorkerStatus.STARTING)
            return
        try:
            [item] = await backend.run([probe_entry(slot, value, timeout)], timeout)
            if item.fault:
                raise BadOutput(item.error or "")
        except asyncio.CancelledError:
            self._breaker.forget()
            raise
        except Exception as exc:
            foreseen = isinstance(exc, HeadwayError)
            error = self.starting.cause = str(exc) if foreseen else repr(exc)
            log.warning("probe failed", worker=slot.worker, error=error, exc_info=not foreseen)
            self._breaker.failure(self._clock())
            # A process whose probe fails may be past help, as after a CUDA error; a fresh one is not.
            self._retire = backend.pid != 0
            await self._become(WorkerStatus.STARTING if self._retire else WorkerStatus.DEGRADED)
        else:
            self._breaker.success(self._clock())
            await self._become(WorkerStatus.HEALTHY)

    async def _run(self, backend: Backend, lease: Lease) -> None:
        """Run one batch to its end, whatever that is."""
        self._keeper.lease = lease
        self._asked = True
        self._running_since = since = self._clock()
        self._counters.departures.left(lease)
        try:
            items = await self.claims.run(backend, lease, self._limits.gpu_timeout)
        except WorkerAbsent:
            self._retire, self._asked = True, False
            await self._tell(lease, lambda: self._broker.release(lease), since)
        except BackendError as exc:
            broken = backend.pid != 0 and isinstance(exc, WorkerCrashed | BatchTimeout)
            places = exc.places if isinstance(exc, BatchRaised) else ()
            failure = BatchFailure(exc.cause, str(exc), self.slot.worker, exc.shown, places)
            await self._failed(lease, failure, since, broken, exc.trace, not isinstance(exc, RemoteAbsent))
        except asyncio.CancelledError:
            with contextlib.suppress(BrokerUnavailable):  # Then the lease lapses.
                await self._broker.release(lease, BatchFailure(Cause.LEASE_LOST, "shut down", self.slot.worker))
            raise
        except Exception as exc:
            log.exception("the backend broke", worker=self.slot.worker)
            failure = BatchFailure(Cause.RAISED, repr(exc), self.slot.worker, "the worker broke")
            await self._failed(lease, failure, since, broken=True)
        else:
            await self._succeeded(lease, items, since)
        finally:
            self._counters.departures.arrived(self.slot.worker, self._clock() - since, GIVEN_BACK)
            self._keeper.lease = self._running_since = None
            self._stirred_at = self._clock()

    async def _succeeded(self, lease: Lease, items: Sequence[ItemResult], since: float) -> None:
        seconds, outages = self._clock() - since, self._availability.outages
        self._counters.departures.arrived(self.slot.worker, seconds)
        self.starting.cause = ""
        settled = await self._tell(lease, lambda: self._broker.complete(lease, items), since)
        self.figures.succeeded(lease, self._clock() - since if self._availability.outages == outages else seconds)
        self._breaker.success(self._clock())
        self._pauses.well()
        self._counts.came_back(lease, items, seconds)
        if settled is not None and settled.departed:
            self._counters.wasted_seconds["departed"] += seconds * settled.departed / len(lease.entries)
        if self._status is not WorkerStatus.HEALTHY:
            await self._become(WorkerStatus.HEALTHY)

    async def _failed(
        self, lease: Lease, failure: BatchFailure, since: float, broken: bool, trace: str = "", ran: bool = True
    ) -> None:
        seconds = self._clock() - since
        await self.figures.look_at_gpu()  # What comes of a GPU that is lost looks like the fault of an input.
        self._note_loss()
        if self.lost:
            failure = BatchFailure(Cause.LEASE_LOST, self.lost, self.slot.worker, "the worker lost its GPU")
        self.starting.cause = failure.message
        self._counters.departures.arrived(self.slot.worker, seconds, failure.cause.value)
        self._failure_log.failed(self.slot.worker, lease, failure, trace)
        if ran:
            self._counts.failed(lease, failure, seconds)
        # After most of a GPU's errors nothing works in that process any more: the next input would be blamed for it.
        erred = self.figures.gpu_erred() and not broken
        # A batch of suspects says little of the backend, unless it was the backend's own fault.
        if erred or lease.reason != RETRY or failure.cause in NEVER_SPLIT:
            self._breaker.failure(self._clock(), certain=erred or not ran)
        if broken:
            self._counts.killed(lease)
            self._counters.departures.killed(self.slot.worker, failure.message)
            self._retire = True
            await self._become(WorkerStatus.STARTING)
        await self._tell(lease, lambda: self._broker.release(lease, failure if ran else None), since)

    async def _tell(self, lease: Lease, tell: Callable[[], Awaitable[T]], since: float) -> T | None:
        """Hand in the outcome of a batch until the broker answers; None if it was given up before.

        It is given up when the first of the batch gives up. A slot that winds down gives it up with its lease, too: then another runs the batch.
        """
        least, failures = self._clock() + LEAST_TIME_LEFT, 0
        while True:
            try:
                answer = await tell()
            except BrokerUnavailable as error:
                self._availability.failed(self._clock(), error)
                failures += 1
                pause = backoff(failures, self._rng())
                until = since + lease.time_left
                if self._winding_down:
                    until = min(until, max(since, self._keeper.renewed_at) + lease.expires_at - lease.granted_at)
                if self._clock() + pause > max(until, least):
                    log.warning("nobody could be told what came of a batch", worker=self.slot.worker, error=str(error))
                    return None
                await asyncio.sleep(pause)
            else:
                await self._reached()
                return answer

    async def _reached(self) -> None:
        """Note that the broker answers. After an outage it may have forgotten this slot, or think that it is gone."""
        if self._availability.over():
            await self._heartbeat()

    async def _started_backend(self, *, fresh: bool) -> Backend:
        backend, starting = self._make_backend(), self.starting
        starting.since = since = self._clock()
        report = self._report
        try:
            if self._read_report is not None:
                report = await self._read_report()
            self._warned_of_full |= await start(backend, self.slot, self._limits, self._clock, fresh=fresh)
        except BaseException as exc:
            await backend.stop()
            if isinstance(exc, TargetError):
                self._failure_log.not_started(self.slot.worker, exc)
            if isinstance(exc, Exception):
                starting.trouble = str(exc)
                self._started(starting.trouble)
            exc.__context__ = None  # A time-out there holds the task in which this ran, which is to hold `exc`.
            raise
        else:
            starting.took = seconds = self._clock() - since
            starting.trouble, self._report = "", report
            self._counters.loads[self.slot.model, self.slot.worker] += 1
            self._counters.load_seconds[self.slot.model].observe(seconds)
            self._started(seconds)
        finally:
            starting.since = None
        return backend

    def _bounded(self, signature: Signature) -> Slot:
        """Slot of the backend as it is now. Batches are bounded by their rows where it takes tensors, unless by weight anyway."""
        rows = self.slot.max_batch if signature.takes is ValueKind.TENSORS else 0
        return msgspec.structs.replace(self.slot, max_weight=self._max_weight or rows, runs=self._report)

    async def _swap(self) -> None:
        """Stop the present backend. A fresh one takes its place if one is ready."""
        old, self._backend, self._fresh = self._backend, self._fresh, None
        if self._backend is None:
            if ended := getattr(old, "ended", ""):
                self._counters.departures.killed(self.slot.worker, ended)
            self.starting.cause = ended or self.starting.cause
            await self._become(WorkerStatus.STARTING)
        else:
            self.slot = self.claims.slot = self._bounded(self._backend.signature)
        if old is not None:
            await old.stop()

    async def _idle(self, pause: Coroutine[Any, Any, object]) -> None:
        """Wait for `pause`, or until the batcher is interrupted."""
        self._pausing = task = asyncio.get_running_loop().create_task(pause)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # It is this loop that was cancelled, not its pause that was interrupted.
        finally:
            self._pausing = None
            del task  # It may hold an exception whose traceback holds this frame.

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._pausing is not None:
            self._pausing.cancel()

    async def _become(self, status: WorkerStatus) -> None:
        self._status, self._stirred_at = status, self._clock()
        if self.lost and status is not WorkerStatus.OFFLINE:
            self._status = WorkerStatus.DEGRADED
        shown, cause = self._status, self.starting.cause
        if self.held and shown is not WorkerStatus.OFFLINE:
            shown, cause = WorkerStatus.DRAINED, BY_OPERATOR
        self._counters.departures.became(self.slot, shown, max(self._restarts, 0), cause)
        await self._heartbeat()

    async def _heartbeat(self) -> bool:
        """Send a heartbeat; False when the broker is out of reach."""
        self._counters.breaker_state[self.slot.worker] = self._breaker.state(self._clock())
        self.figures.read()
        self._note_loss()
        self._look_at_full_batches()
        status, reason = self._standing()
        running, loading = self._running_since is not None, self.starting.seconds(self._clock())
        told = self._fresh is not None and self.figures.runs == self._report
        beat = self.figures.told(
            status,
            reason,
            self._fresh if told else self._backend,  # No batch begins on the other one any more.
            running=running,
            restarts=max(self._restarts, 0),
            loading=loading,
            load_seconds=self.starting.took,
            every=self._every(),
            start_failed=status is WorkerStatus.STARTING and bool(self.starting.trouble),
            retry_in=self.starting.retry_in(self._clock()),
        )
        try:
            await self._broker.heartbeat(beat)
        except BrokerUnavailable:  # The next one will tell.
            return False
        return True

    def _look_at_full_batches(self) -> None:
        """Warn once where the batches that ran tell that a full one exceeds the GPU deadline."""
        pace = self.figures.pace
        if self._warned_of_full or self.figures.batches < TELLING or not pace.items_per_second:
            return
        seconds = self.slot.max_batch / pace.items_per_second
        if seconds > self._limits.gpu_timeout:
            self._warned_of_full = True
            warn_of_full(self.slot, seconds, pace.line, self._limits)

    def _note_loss(self) -> None:
        """Take the slot out when its GPU is lost."""
        figures = self.figures.gpu_figures
        if self.lost or figures is None or not figures.lost:
            return
        self.lost = self.starting.cause = f"its GPU is lost: {figures.lost}"
        hint = "reset the GPU or restart the machine, then start this process anew"
        log.error("worker is taken out", worker=self.slot.worker, reason=self.lost, gpu=figures.uuid, hint=hint)
        self._retire = True
        if self._running_since is not None and self._backend is not None:
            self._ending = asyncio.ensure_future(self._backend.stop())
        self._interrupt()

    def _standing(self) -> tuple[WorkerStatus, str]:
        """Status of the slot to tell, and the reason for which it is not healthy."""
        status, reason = self._own_standing()
        if not self.held or status is WorkerStatus.OFFLINE:
            return status, reason
        runs = f"{BY_OPERATOR}; its batch still runs" if self._running_since is not None else BY_OPERATOR
        return WorkerStatus.DRAINED, f"{runs}; {reason}" if reason else runs

    def _own_standing(self) -> tuple[WorkerStatus, str]:
        """Status of the slot and its reason, unless an operator drains it."""
        if self.lost and self._status is not WorkerStatus.OFFLINE:
            return WorkerStatus.DEGRADED, self.lost
        if self._status is WorkerStatus.DEGRADED:
            return self._status, self.starting.rests(self._breaker.rest_left(self._clock()))
        if self.figures.scarce and self._status is WorkerStatus.HEALTHY:
            return WorkerStatus.DEGRADED, self.figures.scarce
        is_starting = self._status is WorkerStatus.STARTING
        return self._status, self.starting.reason(self._clock(), self.held) if is_starting else ""

    def _every(self) -> float:
        """Seconds between two heartbeats: more of them while the slot rests."""
        settled = self.held or self._status is WorkerStatus.HEALTHY
        busy = self._running_since is not None or self._winding_down or not settled
        return HEARTBEAT_EVERY if busy or self._clock() - self._stirred_at < REST_AFTER else REST_EVERY

    async def _heartbeat_on(self) -> None:
        """Send a heartbeat twice a second, or once while the slot rests, until the last one has told that the slot, which winds down, is offline.

        It reports the busy share.
        """
        self.figures.note_utilisation(self._clock(), 0.0)
        while True:
            if await self._heartbeat() and self._winding_down and self._status is WorkerStatus.OFFLINE:
                return
            await asyncio.sleep(until_tick(self._every()))
            now = self._clock()
            self.figures.note_utilisation(now, now - self._running_since if self._running_since is not None else 0.0)
