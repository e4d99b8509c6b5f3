"""Protocols between services and adapters. Each is small, and has a contract test suite. Time is in seconds.

Every method of Broker is one atomic step. A broker, its dead letters and its fleet may be in another process, so any of
their methods may raise `BrokerUnavailable`, even if the step was carried out."""

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
        """Seconds to wait for more entries before calling `enqueue`, if the last such call was more recent than that."""

    @property
    def epoch(self) -> str:
        """Opaque id of the broker's state, empty before the first successful call. If it changes, the state may have been
        lost, for example in a restart without the data. The cursors of `replies` then start at 0 again."""

    @property
    def memory_pressure(self) -> bool:
        """True if the broker's memory was nearly full when last measured. The broker then admits nothing new."""

    @property
    def apart_from(self) -> float:
        """Input length above which an entry needs its own `enqueue` call, so as not to delay others. May be infinite."""

    @property
    def kept(self) -> KeptLimits:
        """Byte budgets of kept outcomes. A tenant with at most an even share loses none to others. Full budgets prevent no
        admission. An outcome too large for the budgets isn't kept. For a task, a failure that says so is then kept instead."""

    def rate_limit_debt(self, limit: Limit) -> float:
        """Return the minimum number of seconds until the full burst is available, as far as this process knows."""


class Held(Protocol):
    """Entry that a gateway holds. `key` is the entry's tenant and id."""

    entry: Entry
    key: tuple[str, str]


class NearQueue(Protocol):
    """Broker in the gateway's own process. Its calls return immediately, and it delivers replies without being asked."""

    def take(self, entry: Entry) -> Failure | None:
        """Admit or refuse one entry immediately; see `RequestQueue.enqueue`."""

    def enter(self, held: Held, now: float) -> Failure | None:
        """Faster `take` for an entry with a unique id and no version, weight or shape. For `held`, see `attach`."""

    def knows(self, tenant: str, id: str) -> bool: ...

    def attach(self, gateway: str, deliver: Callable[[Sequence[Reply], Sequence[Any]], None]) -> None:
        """Deliver replies to `gateway` from now on, one turn of the event loop after their outcomes. They count as
        acknowledged. The second argument of `deliver` is usually empty. If the replies answer an entire batch of entries
        submitted through `enter`, and all outputs are plain, it contains the `held` of each entry."""


class RequestQueue(QueueCondition, Protocol):
    """A broker as gateways see it: entries go in, replies come out."""

    @property
    def near(self) -> NearQueue | None:
        """View of this queue whose calls return immediately. None if the broker is in another process."""

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Admit or refuse each entry. Returns the failures in the same order, with None for each admitted entry.

        An entry that shares another entry's answer is admitted too, and gets its own reply. For a new entry, its rate limits are
        checked first, then its dedup keys, and then, if it has to run, whether it can be answered in time. Only an admitted entry
        is charged, to all its limits. An entry for a model without a queue is refused.

        An entry that follows a task (`headway.core.dedup.follower`) never runs. It gets one reply: the task's outcome, or a failure if the
        task is forgotten or the entry itself times out. If the tenant has no such task, the entry is refused. Its model is empty if
        unknown."""

    async def withdraw(self, submissions: Sequence[Submission], gateway: str) -> None:
        """Drop submissions from this process that nobody at `gateway` is waiting for any more, and free their ids.

        A queued entry then never reaches a GPU, and a running one gets no reply. There are two exceptions: an entry whose answer
        others share still runs, and so does the first entry with an idempotency key, for later requests with that key. Submissions
        that already have an outcome, and other gateways' submissions with the same id, are unaffected."""

    async def probe(self, gateway: str) -> None:
        """Check that the broker accepts changes from a gateway, without making any."""

    async def takes_reads_only(self) -> bool:
        """Return True if the broker answers but accepts no changes, for example while a replica takes over. Never raises."""

    async def cancel_task(self, tenant: str, id: str) -> None:
        """Forget a task. If it hasn't run yet, it never will. Its outcome isn't kept, and entries that follow it get a failure."""

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        """Wait for replies to `gateway` after the cursor `after`. Returns them with the new cursor. Cursors start at 0. The
        call acknowledges all replies up to `after`. Another call with the same cursor returns the same replies."""

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        """Return the state of an entry, or None if it has an outcome or is unknown. If `tenant` is None, search all tenants."""

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """Return the stored outcome of a task, its state if it has no outcome yet, or None if the task is unknown."""


class BulkQueue(Protocol):
    """A broker's queue of bulk entries, which fill empty seats; see `headway.core.bulk`."""

    async def enqueue_bulk(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Admit or refuse bulk entries, as `RequestQueue.enqueue` does. Entries beyond the limit are refused. Their tier is
        the number of tiers. An entry whose shape isn't 0 is only batched with entries of the same shape. Bulk entries have
        no rate limits and no dedup keys. They never expire, so their sender must withdraw them. If a batch fails, each of
        its bulk entries gets a failure whose reason is the cause, and leaves no dead letter."""


class WorkSource(Protocol):
    """A broker as batchers see it: batches go out, their outcomes come in."""

    # True if each call takes a round trip. A batcher then sends its next claim together with the outcome of its last batch.
    remote: bool = False

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        """Claim the batch that `slot` should run now, or return when to claim again."""

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        """Wait until `slot` should claim: at the time `until`, which its last claim returned, or earlier if it is woken. Each
        wake-up is for only one idle slot. If that slot's call is cancelled, another slot is woken instead."""

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        """Return the next batch of each slot, for slots that share a GPU; see `core.locality`. Each slot must have claimed before."""

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        """End a lease with one item per entry, in order. Large outputs may be delivered earlier, in separate steps."""

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        """End a lease without outputs. Returns False if it was no longer valid. Without a failure, the batch never started,
        and no attempt is charged. Otherwise the retry plan decides about each entry."""

    async def extend(self, lease: Lease) -> bool:
        """Renew a lease for its full length from now. Returns False if it was no longer valid."""

    async def heartbeat(self, worker: WorkerInfo) -> None:
        """Record a heartbeat. Only healthy workers count as capacity."""


class Registry(Protocol):
    """Information about the workers and the queues. A bulk queue is listed once it has had an entry."""

    async def workers(self) -> Sequence[WorkerInfo]: ...

    async def depths(self) -> Sequence[TierDepth]: ...

    async def bulk_queues(self) -> Sequence[BulkDepth]: ...

    async def loads(self) -> Mapping[QueueName, Load]:
        """Return the arrivals, pace and slots of each of this broker's queues."""


class Maintenance(Protocol):
    """Maintenance of a broker, done by one process of a fleet at a time."""

    async def reap(self, rest: float = 0.0) -> float:
        """Expire overdue entries, and reclaim the entries of expired leases. Returns the seconds until the next call is
        due. If nothing is due, the caller pauses for about `rest` seconds. Anything that arrives during the pause, and is
        due before it ends, is still reaped in time."""

    def know(self, models: Mapping[str, QueueLimits], others: bool = False) -> None:
        """Add queues for these models, or change their limits. No queue with entries is removed. If `others` is set, other
        models get queues, too, each for as long as it has entries."""


class Broker(RequestQueue, BulkQueue, WorkSource, Registry, Maintenance, Protocol):
    """Holds waiting entries, grants the best batch for each moment, and returns the answers.

    Every broker obeys these laws:

        1. An admitted entry gets exactly one outcome: answered, failed with a reason, or expired. (A withdrawn entry gets no reply.)
        2. Attempts are counted when a batch is claimed.
        3. A lease has an owner, a fence and an end. A completion with an outdated fence changes nothing.
        4. Releasing work that was never dispatched charges no attempt.
        5. Replies survive a gateway's reconnect.
        6. Enqueue is idempotent by submission (tenant, id, nonce, gateway), and charges limits only once. While an id is in
           use, any other submission with that id is a conflict. A reply has the nonce of the submission that it answers.
        7. All times inside the broker are on the broker's own clock.
        8. `withdraw` ("nobody waits for this any more") differs from `cancel_task` ("forget this"): only the latter removes a kept
           outcome. A withdrawn entry frees its id, but still runs if it has an idempotency key."""


class Fleet(Protocol):
    """The processes of a fleet, their leader, and each model's capacity."""

    async def heartbeat(self, member: ProcessInfo) -> Collection[str]:
        """Record that a process is alive, and return the names of all drains. A process without heartbeats is soon forgotten."""

    async def leave(self, id: str) -> None:
        """Forget a process immediately. If it was the leader, another one may take the lead."""

    async def depart(self, gone: Departed) -> None:
        """Record for a few minutes how a process ended. If a process stops reporting, this is recorded without a call."""

    async def departed(self) -> Sequence[Departed]:
        """Return how processes ended in the last few minutes, up to a limit. Includes processes that have come back since."""

    async def members(self) -> Sequence[ProcessInfo]:
        """Return the processes with a recent heartbeat."""

    async def acquire_leadership(self, candidate: str, seconds: float) -> float:
        """Become or remain the leading controller. Returns 0 on success, otherwise the seconds until the current lead expires."""

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
        """Add drains. If `seen` is given, and the current drains have other names, changes nothing and returns False."""

    async def undrain(self, names: Collection[str]) -> None: ...

    async def keep_rollout(self, rollout: Rollout) -> bool:
        """Replace the last rollout of a model. Changes nothing and returns False unless its revision is one less than that of `rollout`."""


class Board(Protocol):
    """Departure board of a fleet. Its size is limited, and the oldest notices are dropped first."""

    async def post(self, notice: Notice) -> Posted:
        """Post a notice. An empty notice isn't posted; the call then only returns the answer."""

    async def history(self) -> tuple[Sequence[HistoryRow], News]:
        """Return the rows of the last half hour, oldest first, and all notices of the last few minutes. Doesn't wait. The
        rows include everything posted up to the returned cursor and nothing after it. Calling this marks the board as
        watched for a few seconds."""

    async def read(self, after: str) -> News:
        """Wait briefly for notices after a cursor, and return them. Calling this marks the board as watched for a few seconds."""


class DeadLetters(Protocol):
    """Store of dead letters. If it is full, it drops the oldest. If no tenant is given, an id matches all tenants' letters."""

    async def add(self, letter: DeadLetter) -> None:
        """Store a dead letter, replacing any earlier one for the same entry."""

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        """Return the newest dead letters, without inputs and parameters."""

    async def find(self, id: str, tenant: str | None = None) -> Sequence[DeadLetter]: ...

    async def remove(self, id: str, tenant: str | None = None) -> int:
        """Remove the dead letters of the entry `id`. Returns how many there were."""

    async def count(self) -> int: ...

    async def counts(self) -> Mapping[str, int]:
        """Return the number of dead letters by model. Models that have none may be missing."""

    async def totals(self) -> Mapping[str, int]:
        """Return how many dead letters were ever added, by model, including replaced ones. The counts may restart at 0."""


class Backend(Protocol):
    """A slot's copy of the target. It runs one batch at a time."""

    @property
    def pid(self) -> int:
        """Process id of the child process that runs batches, or 0 if there is none."""

    @property
    def signature(self) -> Signature:
        """Kinds of values that the target takes and returns, and its example. Known once the backend has started."""

    @property
    def warm_up(self) -> Sequence[tuple[int, float]]:
        """Size and run time in seconds of each warm-up batch of the last start, except the first."""

    async def start(self) -> float:
        """Start the backend, and run warm-up batches. Returns the seconds that the first of them took, or 0 if none ran.
        Raises TargetError if the target can't be loaded, or fails on a warm-up batch."""

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Run a batch. Returns one item per entry. Raises BackendError if the entire batch failed. After WorkerCrashed or
        BatchTimeout the backend must be restarted."""

    async def gone(self) -> None:
        """Wait until the child process has died or should be replaced."""

    async def stop(self) -> None:
        """End the child process. Safe to call at any time, and more than once."""


class BulkRunner(Protocol):
    """Runs the lines of bulk jobs in seats that would otherwise be empty."""

    async def room(self, model: str) -> int:
        """Wait until a model can accept lines. Returns how many."""

    def offer(self, lines: Sequence[BulkLine], done: Callable[[BulkLine, Reply], None]) -> None:
        """Run lines in empty seats. Each gets one reply. The runner handles retries, outages of the broker, and bad lines."""

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        """Drop a job's unfinished lines or, if given, only those in `numbers`. `done` isn't called for them. Drop many
        lines in one call, because each call goes through all unfinished lines."""

    def full(self, tenant: str) -> bool:
        """Return True if a tenant's unfinished lines have so many bytes that it may not offer any more."""

    def paused(self, model: str, tenant: str = "") -> str:
        """Return why the lines of a model, or of a tenant, are paused. Empty if they aren't."""

    async def look(self) -> None:
        """Find out why offered lines are waiting, unless this was done a moment ago. Raises BrokerUnavailable."""

    def waits(self, model: str, tenant: str) -> tuple[str, float] | None:
        """Return why a tenant's lines for a model are waiting, and the longest they may still wait in seconds (infinite if
        unknown). None if they aren't waiting."""


class Gpu(Protocol):
    """One GPU, as its driver reports it. Several slots may share it."""

    @property
    def settled(self) -> float:
        """Share of the GPU's memory that was in use once the last model had been loaded, from 0 to 1. 0 while unknown."""

    def figures(self) -> GpuFigures | None:
        """Return the last stats that were read, or None if they aren't recent. Doesn't wait."""

    async def look(self) -> GpuFigures | None:
        """Read the stats now. Returns the last known stats if that takes longer than a second."""

    def loaded(self) -> None:
        """Record that a model was loaded, so that the next reading shows how much memory the models need."""


class Identity(Protocol):
    """Authentication: finds the principal of a credential."""

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the principal for an `Authorization` header (empty if none was sent), or None if it isn't valid. Raises
        RequestError, which says when to retry, if the credential can't be checked at present."""


@runtime_checkable
class WatchedIdentity(Protocol):
    """Identity that needn't check a valid credential again while the client stays connected."""

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        """Return a function that identifies this credential again on each call. None if there is no such function."""


@runtime_checkable
class KeyIdentity(Protocol):
    """Identity that authenticates API keys. It can also look up a key by its id, to learn what the key may do now."""

    def principal_of(self, key: str) -> Principal | None:
        """Return the principal of the key with this id, or None if invalid. Raises RequestError if it can't be checked."""


class KeyMark(msgspec.Struct, frozen=True):
    """One change in the history of a key store. `revision` grows with every change, and is 0 before the first one. `mark` is a
    random string that distinguishes changes with the same revision. It is empty if unknown."""

    revision: int = 0
    mark: str = ""


class KeyChanges(msgspec.Struct, frozen=True):
    """Current state of the keys that have changed since an earlier change, in the order of their last changes. `upto` is the last
    of these changes. `more` is True if there may be further ones."""

    keys: Sequence[ApiKey]
    upto: KeyMark
    more: bool


class Store(Protocol):
    """Database of a process. Each method raises StoreUnavailable if the database doesn't answer."""

    async def open(self) -> None:
        """Connect to the store, and bring its tables up to date. Raises SettingError if it can't be used."""

    async def close(self) -> None: ...


class KeyHistory(Protocol):
    """Read access to API keys and their changes. Each method raises StoreUnavailable if the store doesn't answer."""

    async def keys(self) -> Sequence[ApiKey]:
        """Return all keys, including expired ones, oldest first."""

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        """Return at most `limit` keys that were added or changed after `since`. Returns None if `since` may not be part of
        this store's history; then read all keys again, from KeyMark()."""

    async def latest(self) -> KeyMark: ...


class KeyStore(KeyHistory, Store, Protocol):
    """Store of API keys."""

    async def add(self, key: ApiKey) -> None:
        """Add a key. Raises ValueError if its id is taken, or if the key that it replaces already has a valid replacement."""

    async def get(self, id: str) -> ApiKey | None: ...

    async def expire(self, id: str, at: float) -> bool:
        """Make a key expire at Unix time `at`, unless it expires earlier anyway. Returns False if the id is unknown."""

    async def remove_ended(self, before: float, limit: int) -> int:
        """Remove at most `limit` keys that expired, and were last changed, before Unix time `before`. Returns how many. The
        history doesn't record this, because these keys were refused already."""


class Ledger(Store, Protocol):
    """Record of every request."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        """Store all records or none. If a record with the same (tenant, id, completed_at) exists already, it stays as it is."""

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        """Forget the open requests in `ended`, which are given by tenant and id. Then store `records` as open requests,
        replacing earlier ones."""

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        """Return all tenants' records with a request id. Open records come last."""

    async def prune(self, before: float, limit: int) -> int:
        """Remove at most `limit` records completed before Unix time `before`, and open ones of that age. Returns how many."""


class BulkStore(Store, Protocol):
    """Store of bulk jobs and their files' metadata. A tenant can't see other tenants' ids. Leases follow the store's own clock."""

    async def add_file(self, file: BulkFile, most: Stored | None = None, holder: BulkJob | None = None) -> bool:
        """Add a file, or update the size of the file with its id. Returns False if its tenant would exceed `most`, or if the job
        is no longer held by the generation of `holder`."""

    async def file(self, tenant: str, id: str) -> BulkFile | None: ...

    async def files(self, tenant: str, after: str, limit: int, purpose: str = "") -> Sequence[BulkFile]:
        """Return a tenant's newest files. If given, only those with `purpose`, and only those older than file `after`."""

    async def stored(self, tenant: str) -> Stored: ...

    async def remove_file(self, tenant: str, id: str) -> bool:
        """Forget a file. Returns False if it doesn't exist, or if an unfinished job is still reading it."""

    async def old_files(self, before: float, limit: int) -> Sequence[BulkFile]:
        """Return all tenants' oldest files from before Unix time `before`, except those that jobs are reading."""

    async def file_ids(self, after: str, limit: int) -> Sequence[str]:
        """Return the ids of all tenants' files that come after the id `after`, in order."""

    async def add_job(self, job: BulkJob, most: int, most_ended: int = MOST_ENDED) -> bool:
        """Add a job, and keep only its tenant's newest `most_ended` finished jobs. Returns False if the tenant would have
        more than `most` unfinished jobs."""

    async def job(self, tenant: str, id: str) -> BulkJob | None: ...

    async def jobs(self, tenant: str, after: str, limit: int) -> Sequence[BulkJob]:
        """Return a tenant's newest jobs. If `after` is given, only those older than that job."""

    async def open_jobs(self, after: str, limit: int) -> Sequence[BulkJob]:
        """Return all tenants' unfinished jobs with ids after `after`, in order of their ids."""

    async def cancel(self, tenant: str, id: str) -> BulkJob | None:
        """Record that the client wants to cancel a job, unless the job has ended. Returns the job."""

    async def claim(self, owner: str, seconds: float, share: int) -> BulkJob | None:
        """Take the oldest job that nobody holds and whose tenant has fewer than `share` held jobs. Returns None if there is none.
        The lease lasts for `seconds`, and the job's generation is incremented."""

    async def keep(self, job: BulkJob, seconds: float) -> BulkJob | None:
        """Write the state of a held job. Then hold it for another `seconds`, or release it if that is 0. Returns the job as the
        client now wants it. If another generation holds it, writes nothing and returns None."""

    async def remove_jobs(self, before: float, limit: int) -> int:
        """Forget at most `limit` finished jobs from before Unix time `before`. Returns how many."""

    async def counts(self) -> Mapping[str, int]:
        """Return the number of jobs by status."""
