"""The batcher: one loop per slot that claims a batch, runs it, and sends its outcome to the broker.

    start ──ready──▶ claim ◀──────────────┐
      ▲                │ lease            │
      │                ▼                  │
      │   crashed    run ──outputs──▶ complete
      │   or hung      │
      └──── release ◀──┘ failed
            (retry plan)

On each claim, the broker decides whether a batch may start and which entries it contains. A slot counts as capacity only while
it is healthy: its backend is up and warm, and its breaker is closed.

If a slot's GPU is lost, the slot is out of service for good: its batch is released, its backend is stopped, and no other is started.

While an operator drains a slot (`hold`), it doesn't claim batches or start a backend. Its heartbeats report the drain even while
its last batch is still running.

While the broker is unreachable, the slot doesn't claim batches. It delivers the outcome of its last one when the broker is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
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
    CostShape,
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
from headway.runtime.periodic import until_tick
from headway.runtime.race import end
from headway.runtime.supervisor import Supervisor
from headway.worker.batch_traces import BatchTraces
from headway.worker.failure_log import FailureLog
from headway.worker.helping import Claims
from headway.worker.slot_figures import RunCounts, SlotFigures
from headway.worker.starting import Limits, StartState, probe_entry, start, warn_of_full

log = get_logger(__name__)

PROBE_EVERY = 0.05  # Seconds between checks of a breaker while another slot is probing.
CHECK_BREAKER_EVERY = 1.0  # Maximum seconds between checks of an open breaker. Another slot's success may close it.
IN_DOUBT = 0.5  # Seconds for which a slot still counts as healthy while another probes. Probes usually succeed.
PROBE_GRACE = 15.0  # A probe is given up once it has taken this many seconds longer than a batch may take.
BY_OPERATOR = "by an operator"  # Reason reported for a drained slot.
TELLING = 3  # Number of batches from which a full batch's run time can be predicted. The first few may be slow.
LEAST_TIME_LEFT = 1.0  # Minimum seconds of trying to deliver an outcome. Other entries may have later deadlines.
HELD_BACK = 0.1  # Maximum seconds to wait for delivery of the last outcome before a batch claimed ahead is given up.
LEASE_TRIES = 3  # A renewal may take the lease's duration divided by this, so that several tries fit into one lease.

T = TypeVar("T")


class LeaseKeeper:
    """Renews the lease of the batch that a slot is running, independently of its other calls to the broker. `renewed_at` is when
    a renewal last succeeded."""

    def __init__(self, broker: WorkSource, clock: Callable[[], float]) -> None:
        self._broker, self._clock = broker, clock
        self.renewed_at = -math.inf
        self._ended = False
        self._lease: Lease | None = None
        self._granted = asyncio.Event()

    @property
    def lease(self) -> Lease | None:
        """Lease of the running batch; None if no batch is running."""
        return self._lease

    @lease.setter
    def lease(self, lease: Lease | None) -> None:
        self._lease = lease
        if lease is not None:
            self._granted.set()

    async def renew_on(self) -> None:
        """Renew the lease twice a second until `end` is called. Slow renewals are retried on another connection."""
        self._ended = False
        while not self._ended:
            await asyncio.sleep(until_tick(HEARTBEAT_EVERY))
            if (lease := self._lease) is None:
                self._granted.clear()
                await self._granted.wait()
            else:
                with contextlib.suppress(BrokerUnavailable, TimeoutError):
                    async with asyncio.timeout((lease.expires_at - lease.granted_at) / LEASE_TRIES):
                        if await self._broker.extend(lease):
                            self.renewed_at = self._clock()

    def end(self) -> None:
        """End the renewal loop, because the slot won't run any more batches."""
        self._ended = True
        self._granted.set()


class Batcher:
    """The batcher of one slot.

    Arguments:
        make_backend: builds a backend that isn't started yet.
        breaker: the backend's breaker; slots of one remote API share it.
        rng: returns a random number in [0, 1), for pauses.
        memory: returns the used share of the memory available to the slot. While memory is scarce, the slot keeps working
            but doesn't count as capacity.
        gpu: the slot's GPU, whose memory is treated the same way; None if no GPU can be monitored.
        failure_log: log of failed batches, shared by the slots of a process.
        started: called after each attempt to start a backend with the seconds it took, or with the error message.
        read_report: rereads the model's report before each start of a backend; None if it can't change.

    Attributes:
        lost: why the GPU is lost; empty if it isn't.
        held: True while an operator drains the slot.
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
        started: Callable[[float | str], None] = lambda outcome: None,
        traces: BatchTraces | None = None,
        read_report: Callable[[], Awaitable[ModelReport]] | None = None,
    ) -> None:
        self.slot = slot
        self._handing_in: asyncio.Future[None] | None = None
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
        self._used = self._winding_down = self._interrupted = self._rests_held = self._warned_of_full = False
        self._restarts = -1
        self._keeper = LeaseKeeper(broker, clock)
        self._running_since: float | None = None
        self._changed_at = clock()  # When the status last changed or a batch last finished.
        self.figures = SlotFigures(slot, memory, gpu)
        self.lost = ""
        self.held = False
        # Task that stops the backend after its GPU was lost during a batch.
        self._ending: asyncio.Task[None] | None = None
        self._counts = RunCounts(slot, counters, self.figures, limits.tiers)

    @property
    def signature(self) -> Signature | None:
        """The target's signature; None until the target is loaded."""
        return self._backend.signature if self._backend is not None else None

    async def start(self) -> None:
        """Start the backend. Raises TargetError if the target cannot be loaded, fails its warm-up batch, or is too slow."""
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
        """Start serving and sending heartbeats. Return the serving task; it finishes once the slot has wound down."""
        supervisor.start(f"heartbeat of {self.slot.worker}", self._heartbeat_on)
        supervisor.start(f"lease of {self.slot.worker}", self._keeper.renew_on)
        return supervisor.start(f"batcher of {self.slot.worker}", self._serve)

    def wind_down(self) -> None:
        """Stop claiming batches. The loop ends after the running batch."""
        self._winding_down = True
        self._interrupt()

    async def hold(self, held: bool) -> None:
        """Stop or resume claiming, and report it to the fleet. If a backend is starting, its start is completed."""
        if held is self.held or self._winding_down:
            return
        self.held = held
        log.info("worker is drained" if held else "worker is no longer drained", worker=self.slot.worker)
        if self._backend is not None or self._rests_held:
            self._interrupt()
        await self._become(self._status)

    async def replace(self) -> None:
        """Start a fresh backend, then replace the current one with it. Do nothing if the slot's GPU is lost. If the fresh backend
        doesn't start, keep the current one and raise TargetError."""
        if self.lost:
            return
        fresh = await self._started_backend(fresh=True)
        if self._fresh is not None:
            await self._fresh.stop()
        self._fresh = fresh
        self._retire = True
        self._interrupt()

    async def tell_report(self) -> None:
        """Report the model that the slot has run since `replace`. The old backend gets no more batches."""
        if self.figures.runs != self._report:
            self.figures.runs = self._report
            await self._heartbeat()

    async def stop(self) -> None:
        """Stop the backend and report the slot as offline. If the broker is unreachable, the heartbeat loop reports it later."""
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
                while self._backend is not None or self._fresh is not None:
                    await self._swap()
                if not self._winding_down:
                    await self._idle(asyncio.Event().wait())
            elif self._backend is None and self.held:
                await self._rest_held()
            elif self._backend is None and (pause := await self._try_to_start()):
                await self._idle(asyncio.sleep(pause))
            elif self._backend is not None:
                await self._serve_until_gone(self._backend)
                await self._pause_after_idle_death()

    async def _rest_held(self) -> None:
        """Report that no batch is running, then wait until the drain ends or the backend is gone."""
        self._interrupted, self._rests_held = False, True
        try:
            await self._heartbeat()
            if not self._interrupted:
                await self._idle(asyncio.Event().wait())
        finally:
            self._rests_held = False

    async def _try_to_start(self) -> float:
        """Start the backend. Return 0, or if that failed, the seconds until the next attempt."""
        try:
            await self._idle(self.start())
        except (HeadwayError, OSError) as exc:
            pause = self._pauses.start_failed(isinstance(exc, StartKilled))
            self.starting.again_at = self._clock() + pause
            log.error("worker does not start", worker=self.slot.worker, error=str(exc), retry_in=pause)
            return pause
        return 0.0

    async def _pause_after_idle_death(self) -> None:
        """Wait before replacing a backend that keeps dying without having run a batch."""
        if self._used or self._winding_down or self._backend is not None:
            return
        pause = self._pauses.died_idle(self._clock() - self._up_since)
        if pause:
            log.warning("worker keeps dying without having run a batch", worker=self.slot.worker, retry_in=pause)
            await self._idle(asyncio.sleep(pause))

    async def _serve_until_gone(self, backend: Backend) -> None:
        self._up_since, self._used = self._clock(), False
        gone = asyncio.ensure_future(backend.gone())
        # Once the next backend is starting, this one must not interrupt it by exiting.
        gone.add_done_callback(lambda _: self._interrupt() if self._backend is backend else None)
        self._retire = self._fresh is not None  # A replacement may have become ready while this backend was starting.
        try:
            while not self._winding_down and not gone.done() and not self._retire:
                await (self._rest_held() if self.held else self._serve_one(backend, gone))
            await self._handed_in()
        finally:
            await end(self._handing_in)
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
        late = False
        if self._handing_in is not None:
            # If the last outcome takes too long to hand in, another slot should run the next batch.
            if lease is not None and not self._handing_in.done():
                late = not (await asyncio.wait({self._handing_in}, timeout=HELD_BACK))[0]
            if not late:
                await self._handed_in()
        if lease is None:
            return
        rests = self._breaker.state(self._clock()) is State.OPEN
        # All of these may have changed during the call.
        if self._winding_down or self.held or self._retire or late or rests or gone.done():
            await self._deliver(lease, lambda: self._broker.release(lease), self._clock())
            await self._handed_in()
        else:
            await self._run(backend, lease)

    async def _keep_out(self, now: float) -> None:
        """Wait until the breaker should be checked again. The slot counts as degraded meanwhile."""
        since = self._kept_out_since = now if self._kept_out_since is None else self._kept_out_since
        barred = self._breaker.state(now) is State.OPEN or now - since >= IN_DOUBT
        if barred and self._status is not WorkerStatus.DEGRADED:
            await self._become(WorkerStatus.DEGRADED)
        pause = min(max(self._breaker.retry_at(now) - now, PROBE_EVERY), CHECK_BREAKER_EVERY)
        await self._idle(asyncio.sleep(pause))

    async def _claimed(self) -> Lease | None:
        """Claim a batch that is due. If there is none, wait until it is worth claiming again, and return None."""
        self._interrupted = False  # An interrupt during the claim finds no pause to cancel, so check the flag.
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
        """Test the backend with the warm-up input, because the earlier failures may have been caused by the inputs."""
        slot, timeout = self.slot, self._limits.gpu_timeout
        self._used = True
        if (value := backend.signature.warm_up_input) is None:  # If there is none, start a fresh process as the test.
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
            expected = isinstance(exc, HeadwayError)
            error = self.starting.cause = str(exc) if expected else repr(exc)
            log.warning("probe failed", worker=slot.worker, error=error, exc_info=not expected)
            self._breaker.failure(self._clock())
            # A process may be broken beyond recovery, for example by a CUDA error, so replace it.
            self._retire = backend.pid != 0
            await self._become(WorkerStatus.STARTING if self._retire else WorkerStatus.DEGRADED)
        else:
            self._breaker.success(self._clock())
            await self._become(WorkerStatus.HEALTHY)

    async def _run(self, backend: Backend, lease: Lease) -> None:
        self._keeper.lease = lease
        self._used = True
        self._running_since = since = self._clock()
        self._counters.departures.left(lease)
        try:
            items = await self.claims.run(backend, lease, self._limits.gpu_timeout)
        except WorkerAbsent:
            self._retire, self._used = True, False
            await self._deliver(lease, lambda: self._broker.release(lease), since)
        except BackendError as exc:
            broken = backend.pid != 0 and isinstance(exc, WorkerCrashed | BatchTimeout)
            places = exc.places if isinstance(exc, BatchRaised) else ()
            failure = BatchFailure(exc.cause, str(exc), self.slot.worker, exc.shown, places)
            await self._failed(lease, failure, since, broken, exc.trace, not isinstance(exc, RemoteAbsent))
        except asyncio.CancelledError:
            with contextlib.suppress(BrokerUnavailable):  # Then the lease expires.
                await self._broker.release(lease, BatchFailure(Cause.LEASE_LOST, "shut down", self.slot.worker))
            raise
        except Exception as exc:
            log.exception("the backend failed unexpectedly", worker=self.slot.worker)
            failure = BatchFailure(Cause.RAISED, repr(exc), self.slot.worker, "the worker broke")
            await self._failed(lease, failure, since, broken=True)
        else:
            if self._claims_ahead(backend):
                self._handing_in = asyncio.get_running_loop().create_task(self._hand_in(lease, items, since))
                await asyncio.sleep(0)  # The outcome is sent before the claim.
                return
            await self._succeeded(lease, items, since)
        finally:
            if self._handing_in is None:
                self._record_end(since)

    def _claims_ahead(self, backend: Backend) -> bool:
        """Return True if the next batch should be claimed while the outcome of this one is being delivered. This saves the GPU
        an idle round trip. It gains nothing if the run time doesn't depend on the batch size, because waiting then just makes
        the next batch larger."""
        if not self._broker.remote:
            return False
        cost = backend.signature.cost
        if cost is None or cost.shape is CostShape.NUMBER:
            return False
        healthy = self._status is WorkerStatus.HEALTHY and self._breaker.state(self._clock()) is State.CLOSED
        return healthy and not (self.held or self._winding_down or self._retire)

    async def _hand_in(self, lease: Lease, items: Sequence[ItemResult], since: float) -> None:
        try:
            await self._succeeded(lease, items, since)
        finally:
            self._record_end(since)

    async def _handed_in(self) -> None:
        """If the slot claimed ahead, wait until the previous batch has been handed in."""
        handing_in, self._handing_in = self._handing_in, None
        if handing_in is not None:
            await handing_in

    def _record_end(self, since: float) -> None:
        self._counters.departures.arrived(self.slot.worker, self._clock() - since, GIVEN_BACK)
        self._keeper.lease = self._running_since = None
        self._changed_at = self._clock()

    async def _succeeded(self, lease: Lease, items: Sequence[ItemResult], since: float) -> None:
        seconds, outages = self._clock() - since, self._availability.outages
        self._counters.departures.arrived(self.slot.worker, seconds)
        self.starting.cause = ""
        settled = await self._deliver(lease, lambda: self._broker.complete(lease, items), since)
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
        await self.figures.look_at_gpu()  # A lost GPU could be mistaken for a bad input.
        self._check_gpu_loss()
        if self.lost:
            failure = BatchFailure(Cause.LEASE_LOST, self.lost, self.slot.worker, "the worker lost its GPU")
        self.starting.cause = failure.message
        self._counters.departures.arrived(self.slot.worker, seconds, failure.cause.value)
        self._failure_log.failed(self.slot.worker, lease, failure, trace)
        if ran:
            self._counts.failed(lease, failure, seconds)
        # After most GPU errors, the process can't run anything else, and the next input would be blamed.
        erred = self.figures.gpu_erred() and not broken
        # Suspects are expected to fail, so their failure says little about the backend unless the backend caused it.
        if erred or lease.reason != RETRY or failure.cause in NEVER_SPLIT:
            self._breaker.failure(self._clock(), certain=erred or not ran)
        if broken:
            self._counts.killed(lease)
            self._counters.departures.killed(self.slot.worker, failure.message)
            self._retire = True
            await self._become(WorkerStatus.STARTING)
        await self._deliver(lease, lambda: self._broker.release(lease, failure if ran else None), since)

    async def _deliver(self, lease: Lease, deliver: Callable[[], Awaitable[T]], since: float) -> T | None:
        """Hand in the outcome of a batch, retrying until the broker answers. Give up and return None at the deadline of the
        first entry or, if the slot is winding down, when the lease expires, because another slot then runs the batch."""
        least, failures = self._clock() + LEAST_TIME_LEFT, 0
        while True:
            try:
                answer = await deliver()
            except BrokerUnavailable as error:
                self._availability.failed(self._clock(), error)
                failures += 1
                pause = backoff(failures, self._rng())
                until = since + lease.time_left
                if self._winding_down:
                    until = min(until, max(since, self._keeper.renewed_at) + lease.expires_at - lease.granted_at)
                if self._clock() + pause > max(until, least):
                    log.warning(
                        "the outcome of a batch could not be handed in", worker=self.slot.worker, error=str(error)
                    )
                    return None
                await asyncio.sleep(pause)
            else:
                await self._reached()
                return answer

    async def _reached(self) -> None:
        """Record that the broker answered. If an outage is over, send a heartbeat, because the broker may have forgotten the slot."""
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
            exc.__context__ = (
                None  # If this is a timeout, it references this task, which references `exc`: break the cycle.
            )
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
        """Return the slot for a backend. If the target takes tensors and no maximum weight is set, the number of rows is limited."""
        rows = self.slot.max_batch if signature.takes is ValueKind.TENSORS else 0
        return msgspec.structs.replace(self.slot, max_weight=self._max_weight or rows, runs=self._report)

    async def _swap(self) -> None:
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
        """Run `pause` until it finishes or is interrupted."""
        self._pausing = task = asyncio.get_running_loop().create_task(pause)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # The loop itself was cancelled, not its pause.
        finally:
            self._pausing = None
            del task  # Its exception's traceback may hold this frame.

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._pausing is not None:
            self._pausing.cancel()

    async def _become(self, status: WorkerStatus) -> None:
        self._status, self._changed_at = status, self._clock()
        if self.lost and status is not WorkerStatus.OFFLINE:
            self._status = WorkerStatus.DEGRADED
        shown, cause = self._status, self.starting.cause
        if self.held and shown is not WorkerStatus.OFFLINE:
            shown, cause = WorkerStatus.DRAINED, BY_OPERATOR
        self._counters.departures.became(self.slot, shown, max(self._restarts, 0), cause)
        await self._heartbeat()

    async def _heartbeat(self) -> bool:
        """Send a heartbeat. Return False if the broker is unreachable."""
        self._counters.breaker_state[self.slot.worker] = self._breaker.state(self._clock())
        self.figures.read()
        self._check_gpu_loss()
        self._check_full_batches()
        status, reason = self._reported_status()
        replaced = self._fresh is not None and self.figures.runs == self._report
        worker = self.figures.worker_info(
            status,
            reason,
            self._fresh if replaced else self._backend,  # No more batches begin on the replaced one.
            self.starting,
            self._clock(),
            running=self._running_since is not None,
            restarts=max(self._restarts, 0),
            every=self._every(),
        )
        try:
            await self._broker.heartbeat(worker)
        except BrokerUnavailable:  # The next heartbeat will report it.
            return False
        return True

    def _check_full_batches(self) -> None:
        """Warn, once, if the batches so far predict that a full one would exceed the GPU deadline."""
        pace = self.figures.pace
        if self._warned_of_full or self.figures.batches < TELLING or not pace.items_per_second:
            return
        seconds = self.slot.max_batch / pace.items_per_second
        if seconds > self._limits.gpu_timeout:
            self._warned_of_full = True
            warn_of_full(self.slot, seconds, pace.line, self._limits)

    def _check_gpu_loss(self) -> None:
        """Take the slot out of service once its GPU is lost."""
        figures = self.figures.gpu_figures
        if self.lost or figures is None or not figures.lost:
            return
        self.lost = self.starting.cause = f"its GPU is lost: {figures.lost}"
        hint = "reset the GPU or restart the machine, then restart this process"
        log.error(
            "worker is taken out of service", worker=self.slot.worker, reason=self.lost, gpu=figures.uuid, hint=hint
        )
        self._retire = True
        if self._running_since is not None and self._backend is not None:
            self._ending = asyncio.ensure_future(self._backend.stop())
        self._interrupt()

    def _reported_status(self) -> tuple[WorkerStatus, str]:
        """Return the status to report, and why the slot isn't healthy."""
        status, reason = self._own_status()
        if not self.held or status is WorkerStatus.OFFLINE:
            return status, reason
        runs = f"{BY_OPERATOR}; its batch is still running" if self._running_since is not None else BY_OPERATOR
        return WorkerStatus.DRAINED, f"{runs}; {reason}" if reason else runs

    def _own_status(self) -> tuple[WorkerStatus, str]:
        """Return the slot's status and reason, ignoring any drain."""
        if self.lost and self._status is not WorkerStatus.OFFLINE:
            return WorkerStatus.DEGRADED, self.lost
        if self._status is WorkerStatus.DEGRADED:
            return self._status, self.starting.rests(self._breaker.rest_left(self._clock()))
        if self.figures.scarce and self._status is WorkerStatus.HEALTHY:
            return WorkerStatus.DEGRADED, self.figures.scarce
        is_starting = self._status is WorkerStatus.STARTING
        return self._status, self.starting.reason(self._clock(), self.held) if is_starting else ""

    def _every(self) -> float:
        """Return the seconds between heartbeats. They are less frequent while the slot is idle."""
        settled = self.held or self._status is WorkerStatus.HEALTHY
        busy = self._running_since is not None or self._winding_down or not settled
        return HEARTBEAT_EVERY if busy or self._clock() - self._changed_at < REST_AFTER else REST_EVERY

    async def _heartbeat_on(self) -> None:
        """Send heartbeats twice a second, or once a second while the slot is idle. Return once the slot has wound down."""
        self.figures.update_utilisation(self._clock(), 0.0)
        while True:
            if await self._heartbeat() and self._winding_down and self._status is WorkerStatus.OFFLINE:
                return
            await asyncio.sleep(until_tick(self._every()))
            now = self._clock()
            self.figures.update_utilisation(now, now - self._running_since if self._running_since is not None else 0.0)


class ServingBatchers(dict[Batcher, asyncio.Task[None]]):
    """The serving batchers of a pool and their tasks."""

    async def finish(self, batcher: Batcher) -> None:
        """Wait for the batcher's last batch, then take its slot offline, without waiting for other slots."""
        if (serving := self.get(batcher)) is not None:
            await asyncio.shield(
                serving
            )  # The loop belongs to the supervisor, so cancelling the caller must not end it.
        await batcher.stop()
        self.pop(batcher, None)


async def replace_all(batchers: Sequence[Batcher]) -> None:
    """Replace the backends one after another. Stop if one fails to start. The fleet is told about the new code only once
    all batchers run it. Until then, answers are shared as answers of the old code. Afterwards, no request joins a batch that
    started on the old code."""
    try:
        for batcher in batchers:
            await batcher.replace()
    finally:
        for batcher in batchers:
            await batcher.tell_report()
