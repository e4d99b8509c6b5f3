"""Protocols between services and adapters. Each is small, and has a contract test suite.

Time is in seconds. Every method of Broker is one atomic step. A broker, its dead letters and its fleet may be in another process,
so any of their methods may raise `BrokerUnavailable`. The step may have been done anyway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from headway.core.departure import Load, Policy
from headway.core.locality import Contender
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.model import (
    ApiKey,
    BatchFailure,
    BulkDepth,
    Capacity,
    Completion,
    DeadLetter,
    Departed,
    Drain,
    Entry,
    EntryState,
    Failure,
    GpuFigures,
    ItemResult,
    Lease,
    LedgerRecord,
    Limit,
    NoWork,
    Principal,
    ProcessInfo,
    QueueName,
    Reply,
    Rollout,
    Signature,
    Slot,
    Submission,
    TierDepth,
    WorkerInfo,
)
from headway.model.board import HistoryRow, News, Notice, Posted
from headway.model.bulk import MOST_ENDED, BulkFile, BulkJob, BulkLine, Stored


class QueueCondition(Protocol):
    """Last known condition of a queue. Reading it makes no call."""

    @property
    def linger(self) -> float:
        """Seconds to gather entries before a call of `enqueue`, while calls follow each other closely."""

    @property
    def epoch(self) -> str:
        """Opaque id of the broker's state; empty until a call has succeeded. It changes when the state may have been lost, for
        example by a restart without data. The cursors of `replies` then start at 0 again."""

    @property
    def memory_pressure(self) -> bool:
        """True if the broker's memory was nearly full at the last look. It then admits nothing new."""

    @property
    def apart_from(self) -> float:
        """Input length above which an entry gets a call of `enqueue` of its own, as no other entry should wait for a long call;
        infinite for none."""

    @property
    def kept(self) -> KeptLimits:
        """Byte budgets of kept outcomes.

        One tenant's kept outcomes never displace another tenant's, and never keep an entry from being admitted. An outcome that is
        too large for the budgets is not kept. If it is the outcome of a task, a failure that says so is
        kept instead."""

    def rate_limit_debt(self, limit: Limit) -> float:
        """Return the least seconds until the full burst is available, as far as this process knows."""


class Held(Protocol):
    """Entry that a gateway holds. `key` is the entry's tenant and id."""

    entry: Entry
    key: tuple[str, str]


class NearQueue(Protocol):
    """Broker in the gateway's own process. Its calls return at once. The gateway needn't ask for replies, as the broker
    delivers them."""

    def take(self, entry: Entry) -> Failure | None:
        """Admit or refuse one entry immediately; see `RequestQueue.enqueue`."""

    def enter(self, held: Held, now: float) -> Failure | None:
        """Fast path of `take`, for an entry without version, weight and shape, whose id no other entry has. `held` comes back with
        the output."""

    def knows(self, tenant: str, id: str) -> bool: ...

    def attach(self, gateway: str, deliver: Callable[[Sequence[Reply], Sequence[Any]], None]) -> None:
        """Deliver replies to `gateway` from now on, in the loop's next turn after their outcomes. They count as acknowledged.

        If the replies answer a whole batch of entries that came by `enter`, all with plain outputs, the second argument of
        `deliver` has what is held for each of them. Otherwise it is empty."""


class RequestQueue(QueueCondition, Protocol):
    """Gateway's side of a broker: entries go in, replies come out."""

    @property
    def near(self) -> NearQueue | None:
        """View of this queue whose calls return at once. None if the broker is in another process."""

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Admit or refuse each entry. The result has None for each admitted entry, in the same order.

        An entry that joins another's answer is admitted too, and gets its own reply. A new entry is judged by its rate limits, then
        by its dedup keys, and then, if it has to run, by whether it can be answered in time. Only an admitted entry is charged, to
        all its limits. An entry for a model without a queue is refused.

        An entry that follows a task (`headway.core.dedup.follower`) never runs. It gets one reply, which is the task's outcome, or
        a failure if the task is forgotten or the entry's own time is over. If its tenant has no such task, it is refused. Its model
        is empty if unknown."""

    async def withdraw(self, submissions: Sequence[Submission], gateway: str) -> None:
        """Let go of submissions of this process that nobody at `gateway` waits for any more, and free their ids.

        A queued entry then never reaches a GPU, and a running one gets no reply. But it runs on if others have joined it, or if it
        is the first under an idempotency key, for later requests with that key. Submissions that have their outcomes, and
        submissions of other gateways under the same id, are unaffected."""

    async def probe(self, gateway: str) -> None:
        """Check that the broker accepts changes by a gateway, without making one."""

    async def takes_reads_only(self) -> bool:
        """Return True if the broker answers but accepts no changes, for example while a replica takes over. Never raises."""

    async def cancel_task(self, tenant: str, id: str) -> None:
        """Forget a task. If it has not run, it never will. Its outcome is not kept, and entries that follow it get a failure."""

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        """Wait for replies to `gateway` after cursor `after`, which starts at 0. Returns them with the new cursor.

        The call acknowledges all replies up to its cursor. A call with the same cursor gets the same replies again."""

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        """Return the state of an entry, of any tenant for None; None if the entry has its outcome or is unknown."""

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """Return the kept outcome of a task, or its state before it has one; None if the task is unknown."""


class BulkQueue(Protocol):
    """Bulk side of a broker: entries that fill empty seats, see `headway.core.bulk`."""

    async def enqueue_bulk(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Admit or refuse bulk entries, as `RequestQueue.enqueue` does. Entries beyond the limit are refused.

        Their tier is the number of tiers. An entry of a shape other than 0 rides only with others of that shape. Bulk entries have
        no rate limits and no dedup keys. They never expire, so their sender withdraws them. If a batch fails, its bulk entries get
        a failure with the cause as its reason, and leave no dead letter."""


class WorkSource(Protocol):
    """Batcher's side of a broker: batches go out, their outcomes come in."""

    # True if each call takes a round trip. A batcher then sends its next claim along with the outcome of its last batch.
    remote: bool = False

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        """Claim the batch that leaves now for `slot`, or return when to claim again."""

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        """Wait until `slot` should claim again, which is at a wake-up or at `until`, the answer to its last claim.

        A wake-up wakes one of several idle slots. A cancelled call passes its wake-up on."""

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        """Return the next batch of each of the slots that share a GPU, for `core.locality`. Each must have claimed before."""

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        """End a lease with one item per entry, in order. A broker may answer entries with large outputs in atomic steps of their
        own, before the step that ends the lease."""

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        """End a lease without outputs. Returns False if the lease was no longer valid.

        Without a failure the work never started, and nothing is charged. With one, the retry plan decides about each entry."""

    async def extend(self, lease: Lease) -> bool:
        """Renew a lease by its full length from now. Returns False if it was no longer valid."""

    async def heartbeat(self, worker: WorkerInfo) -> None:
        """Record a heartbeat. Only healthy workers count as capacity."""


class Registry(Protocol):
    """Figures of the workers and the queues. A queue of bulk entries is listed once it has had any."""

    async def workers(self) -> Sequence[WorkerInfo]: ...

    async def depths(self) -> Sequence[TierDepth]: ...

    async def bulk_queues(self) -> Sequence[BulkDepth]: ...

    async def loads(self) -> Mapping[QueueName, Load]:
        """Return arrivals, pace and slots of each queue of this broker."""


class Maintenance(Protocol):
    """Upkeep of a broker, by one process of a fleet at a time."""

    async def reap(self, rest: float = 0.0) -> float:
        """Expire overdue entries and take back expired leases. Returns the seconds until the next call is due.

        If nothing is due, the caller rests for about `rest` seconds. What comes meanwhile and is due sooner is reaped by then."""

    def know(self, models: Mapping[str, QueueLimits], others: bool = False) -> None:
        """Add queues for these models, or change their limits. Queues with entries stay. With `others`, models that aren't listed
        also have a queue from now on while they have entries."""


class Broker(RequestQueue, BulkQueue, WorkSource, Registry, Maintenance, Protocol):
    """Holds waiting entries, hands out the best batch at each instant, and returns the answers.

    Every broker keeps these laws:

        1. An admitted entry gets exactly one outcome: answered, failed with a reason, or expired. (A withdrawn entry gets no reply.)
        2. Attempts are counted when a batch is claimed.
        3. A lease has an owner, a fence and an end. A completion with an outdated fence changes nothing.
        4. Releasing work that was never dispatched charges no attempt.
        5. Replies survive a gateway's reconnect.
        6. Enqueue is idempotent by submission (tenant, id, nonce, gateway), and charges a limit once. A second submission under an id in use
           is a conflict. A reply has the nonce of the submission that it answers.
        7. All times inside the broker are on the broker's own clock.
        8. "Nobody waits for this any more" (`withdraw`) and "forget it" (`cancel_task`) differ: only the latter removes a kept outcome.
           A withdrawn entry frees its id, but under an idempotency key it runs on."""


class Fleet(Protocol):
    """The processes of a fleet, their leader, and the capacities."""

    async def heartbeat(self, member: ProcessInfo) -> Collection[str]:
        """Record that a process is alive, and return the names of all drains. Some seconds later it is forgotten again."""

    async def leave(self, id: str) -> None:
        """Forget a process at once. If it led, another may take the lead."""

    async def depart(self, gone: Departed) -> None:
        """Record the end of a process, for some minutes. If a process falls silent, its end is recorded without this call."""

    async def departed(self) -> Sequence[Departed]:
        """Return the recorded ends of the last minutes, up to a limit, even of processes that have come back since."""

    async def members(self) -> Sequence[ProcessInfo]:
        """Return the processes with a recent heartbeat."""

    async def acquire_leadership(self, candidate: str, seconds: float) -> float:
        """Take or renew the lead of the controllers. Returns 0 on success, else the seconds until the present lead ends."""

    async def acquire_load(self, model: str, candidate: str, seconds: float) -> bool:
        """Take or renew the right to load a model for `seconds`. Returns False while another process has it."""

    async def publish(self, capacity: Capacity) -> None: ...

    async def withdraw_capacity(self, model: str) -> None: ...

    async def capacities(self) -> Sequence[Capacity]:
        """Return the last published capacity of each model."""

    async def rollouts(self) -> Sequence[Rollout]:
        """Return the last rollout of each model that had one."""

    async def drains(self) -> Sequence[Drain]: ...

    async def drain(self, drains: Sequence[Drain], seen: Collection[str] | None = None) -> bool:
        """Put drains in force. With `seen`, returns False and changes nothing if other drains than these are in force, by name."""

    async def undrain(self, names: Collection[str]) -> None: ...

    async def keep_rollout(self, rollout: Rollout) -> bool:
        """Replace the last rollout. If its revision isn't the one before the revision of `rollout`, nothing changes,
        and the call returns False."""


class Board(Protocol):
    """Departure board of a fleet. It is bounded, and the oldest notices go first."""

    async def post(self, notice: Notice) -> Posted:
        """Post a notice. An empty notice only asks for the answer."""

    async def history(self) -> tuple[Sequence[HistoryRow], News]:
        """Return the rows of the last half hour, oldest first, and the whole notices of the last minutes, without waiting.

        The rows count exactly what was posted up to the cursor. The board then counts as watched for some seconds."""

    async def read(self, after: str) -> News:
        """Wait a short while for notices after a cursor, and return any. The board then counts as watched for some seconds."""


class DeadLetters(Protocol):
    """Dead letters, of which the oldest goes if there are too many. An id without a tenant means the entries of all tenants."""

    async def add(self, letter: DeadLetter) -> None:
        """Keep a dead letter. It replaces an earlier one of the same entry."""

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the newest dead letters, without inputs and parameters."""

    async def find(self, id: str, tenant: str | None = None) -> Sequence[DeadLetter]: ...

    async def remove(self, id: str, tenant: str | None = None) -> int:
        """Remove the dead letters of entry `id`. Returns their number."""

    async def count(self) -> int: ...

    async def counts(self) -> Mapping[str, int]:
        """Return the number of dead letters by model. Models without any may be missing."""

    async def totals(self) -> Mapping[str, int]:
        """Return the number of dead letters ever added, by model, including replaced letters. The count may restart at 0."""


class Backend(Protocol):
    """One slot's way to the black box. It runs one batch at a time."""

    @property
    def pid(self) -> int:
        """Process id of the child that runs batches; 0 if there is none."""

    @property
    def signature(self) -> Signature:
        """Kinds of values that the target takes and returns, and its example; known after the start."""

    @property
    def warm_up(self) -> Sequence[tuple[int, float]]:
        """Sizes and run times in seconds of the last start's batches after the first warm-up, if any."""

    async def start(self) -> float:
        """Start the backend, including a warm-up batch. Returns the run time in seconds of the first warm-up; 0 without any.

        Raises TargetError if the target cannot be loaded, or fails its warm-up batch."""

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Run a batch. Returns one item per entry.

        Raises BackendError if the whole batch failed. After WorkerCrashed or BatchTimeout the backend must be restarted."""

    async def gone(self) -> None:
        """Wait until the child has died, or should be replaced."""

    async def stop(self) -> None:
        """End the child. Safe to call at any time, and more than once."""


class BulkRunner(Protocol):
    """Runs lines of bulk jobs in otherwise empty seats."""

    async def room(self, model: str) -> int:
        """Wait until a model can take lines. Returns how many."""

    def offer(self, lines: Sequence[BulkLine], done: Callable[[BulkLine, Reply], None]) -> None:
        """Run lines in empty seats. Each gets one reply. The runner handles retries, outages of the broker, and bad lines."""

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        """Drop a job's unfinished lines, or only the lines with these numbers. `done` is not called for them.

        Drop many in one call, as each call looks through all unfinished lines."""

    def full(self, tenant: str) -> bool:
        """Return True if a tenant has so many bytes of unfinished lines that it may offer no more."""

    def paused(self, model: str, tenant: str = "") -> str:
        """Return why a model or a tenant's lines are paused; "" if they aren't."""

    async def look(self) -> None:
        """Find out why offered lines wait, unless that was done a moment ago. Raises BrokerUnavailable."""

    def waits(self, model: str, tenant: str) -> tuple[str, float] | None:
        """Return why lines of a model and tenant wait, and at most how many seconds (infinite if unknown); None if they run."""


class Gpu(Protocol):
    """One GPU, as its driver reports it. Several slots may share it."""

    @property
    def settled(self) -> float:
        """Share of its memory that was in use after the last model had been loaded, 0 to 1; 0 while unknown."""

    def figures(self) -> GpuFigures | None:
        """Return the figures that were read last, if recent. Does not wait."""

    async def look(self) -> GpuFigures | None:
        """Read the figures now. Returns the last known figures if that takes longer than a second."""

    def loaded(self) -> None:
        """Note that a model has been loaded, so that the next reading of the memory shows what the models need."""


class Identity(Protocol):
    """Authentication: finds the principal of a credential."""

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the principal for the value of an `Authorization` header ("" if none was sent); None if it is not valid.

        Raises RequestError, which says when to retry, if the credential cannot be checked at present."""


@runtime_checkable
class WatchedIdentity(Protocol):
    """Identity that need not check a good credential again while its sender stays connected."""

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        """Return a function for this credential. It returns what `Identity.identify` would return at the time of the
        call. Return None if there is no such function."""


@runtime_checkable
class KeyIdentity(Protocol):
    """Identity of API keys, which can tell what a key sent earlier may do now."""

    def principal_of(self, key: str) -> Principal | None:
        """Return the principal of the key with this id; None if it is not valid. Raises RequestError if it cannot be checked at
        present."""


class KeyMark(msgspec.Struct, frozen=True):
    """One change in the history of a store of keys. `revision` grows with every change, and is 0 before the first one. `mark` is a
    random text that distinguishes changes of the same revision, and is empty if unknown."""

    revision: int = 0
    mark: str = ""


class KeyChanges(msgspec.Struct, frozen=True):
    """Present state of the keys that changed after some earlier change, in the order of their last changes. `upto` is the last of
    these changes. `more` is True if there may be further changes."""

    keys: Sequence[ApiKey]
    upto: KeyMark
    more: bool


class Store(Protocol):
    """Database of a process. Each method raises StoreUnavailable if it does not answer."""

    async def open(self) -> None:
        """Connect to the store, and bring its tables up to date. Raises SettingError if it cannot be used."""

    async def close(self) -> None: ...


class KeyHistory(Protocol):
    """Read access to API keys and their changes. Each method raises StoreUnavailable if the store does not answer."""

    async def keys(self) -> Sequence[ApiKey]:
        """Return all keys, including expired ones, oldest first."""

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        """Return at most `limit` keys that were added or changed after `since`.

        None if that change may not be part of the present store's history. Then read all keys again, from KeyMark()."""

    async def latest(self) -> KeyMark: ...


class KeyStore(KeyHistory, Store, Protocol):
    """Store of API keys."""

    async def add(self, key: ApiKey) -> None:
        """Add a new key. Raises ValueError if its id is taken, or if the key that it replaces already has a valid replacement."""

    async def get(self, id: str) -> ApiKey | None: ...

    async def expire(self, id: str, at: float) -> bool:
        """Let a key expire at Unix time `at`, or earlier if the key already has an earlier end. Returns False for an
        unknown id."""

    async def remove_ended(self, before: float, limit: int) -> int:
        """Remove at most `limit` keys that expired, and were last changed, before Unix time `before`. Returns their number.

        This makes no entry in the history, as these keys were refused already."""


class Ledger(Store, Protocol):
    """Record of every request."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        """Keep all records or none. A record that is already there, by (tenant, id, completed_at), stays as it is."""

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        """Forget the open requests `ended`, by tenant and id. Then note `records` as open, in place of earlier notes."""

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        """Return the records of a request id, of all tenants. Open records come last."""

    async def prune(self, before: float, limit: int) -> int:
        """Remove at most `limit` records completed before Unix time `before`, and open ones that old. Returns their number."""


class BulkStore(Store, Protocol):
    """Store of bulk jobs and their files' metadata. A tenant can't see other tenants' ids. Leases are on the store's own clock."""

    async def add_file(self, file: BulkFile, most: Stored | None = None, holder: BulkJob | None = None) -> bool:
        """Add a file, or update the size of the one with its id. Returns False if its tenant would exceed `most`, or if another
        generation than `holder`'s holds the job."""

    async def file(self, tenant: str, id: str) -> BulkFile | None: ...

    async def files(self, tenant: str, after: str, limit: int, purpose: str = "") -> Sequence[BulkFile]:
        """Return a tenant's newest files, of one purpose if given, and older than the file `after` if given."""

    async def stored(self, tenant: str) -> Stored: ...

    async def remove_file(self, tenant: str, id: str) -> bool:
        """Forget a file. Returns False if it is not there, or if an unfinished job is still reading it."""

    async def old_files(self, before: float, limit: int) -> Sequence[BulkFile]:
        """Return the oldest files from before Unix time `before`, of all tenants, except those that jobs read."""

    async def file_ids(self, after: str, limit: int) -> Sequence[str]:
        """Return the ids of all tenants' files in order, after the id `after`."""

    async def add_job(self, job: BulkJob, most: int, most_ended: int = MOST_ENDED) -> bool:
        """Add a job. Returns False if its tenant would have more than `most` unfinished jobs. Of its finished jobs the newest
        `most_ended` are kept."""

    async def job(self, tenant: str, id: str) -> BulkJob | None: ...

    async def jobs(self, tenant: str, after: str, limit: int) -> Sequence[BulkJob]:
        """Return a tenant's newest jobs, older than the job `after` if given."""

    async def open_jobs(self, after: str, limit: int) -> Sequence[BulkJob]:
        """Return all tenants' unfinished jobs in order of their ids, after the id `after`."""

    async def cancel(self, tenant: str, id: str) -> BulkJob | None:
        """Note that the client wants a job to end, unless it has ended. Returns the job."""

    async def claim(self, owner: str, seconds: float, share: int) -> BulkJob | None:
        """Take the oldest job that nobody holds, of a tenant with fewer than `share` held jobs. None if there is none. The lease
        lasts for `seconds`, and the job enters its next generation."""

    async def keep(self, job: BulkJob, seconds: float) -> BulkJob | None:
        """Write the state of a held job, and hold it for another `seconds` from now; 0 releases it.

        Returns the job with the client's present wish. If another generation holds it, returns None and writes nothing."""

    async def remove_jobs(self, before: float, limit: int) -> int:
        """Forget at most `limit` finished jobs from before Unix time `before`. Returns their number."""

    async def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
