"""Protocols between services and adapters: small, and each held by one contract suite.

Time is in seconds. Every method of Broker is one atomic step. A broker, its dead letters and its fleet may be in
another process: each of their methods may raise `BrokerUnavailable`, and may then have been done or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from headway.core.departure import Load, Policy
from headway.core.locality.turns import Contender
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
    """Condition of a queue as this process last heard of it; no call is made for it."""

    @property
    def linger(self) -> float:
        """Seconds for which entries are worth gathering when calls of `enqueue` would follow each other closely."""

    @property
    def epoch(self) -> str:
        """Opaque id of the broker's state; changes when that state may have been lost, as by a restart without data.

        Empty until a call has succeeded. With a new one the cursors of `replies` begin at 0 again."""

    @property
    def memory_pressure(self) -> bool:
        """Whether the broker's memory was nearly full when last looked at; the broker then admits nothing new."""

    @property
    def apart_from(self) -> float:
        """Length of an input above which it is brought to the broker by itself; infinite where none is.

        A call of `enqueue` with such an entry takes longer, so it should keep no others waiting.
        """

    @property
    def kept(self) -> KeptLimits:
        """Byte budgets of kept outcomes.

        The kept outcomes of one tenant cost no other tenant an outcome, and none the admission. An outcome that is
        larger than the budgets allow is not kept; a failure that says so takes the place of a task's.
        """

    def rate_limit_debt(self, limit: Limit) -> float:
        """Lower bound, from what this process knows, on the seconds until the full burst is available."""


class Held(Protocol):
    """What a gateway holds of an entry; `key`: the entry's tenant and id."""

    entry: Entry
    key: tuple[str, str]


class NearQueue(Protocol):
    """Broker, as a gateway in its own process uses it: no call has to wait, and no reply has to be asked for."""

    def take(self, entry: Entry) -> Failure | None:
        """Admit or refuse one entry at once; see `RequestQueue.enqueue`."""

    def enter(self, held: Held, now: float) -> Failure | None:
        """Admit or refuse, as `take` does, an entry that has no version, weight or shape, under an id that no other has.

        Arguments:
            held: what its gateway holds of it, which comes back with its output.
            now: the present instant on the queue's clock.
        """

    def knows(self, tenant: str, id: str) -> bool:
        """Whether a task is known here, or its outcome."""

    def attach(self, gateway: str, deliver: Callable[[Sequence[Reply], Sequence[Any]], None]) -> None:
        """Hand over each reply to `gateway` from now on, on a turn of the loop after that of its outcome. It is acknowledged by then.

        Arguments:
            gateway: id of the gateway.
            deliver: takes replies, and what is held of each if they are those to a whole batch of entries that were entered with
                that, and each got an output and nothing beside it; else an empty sequence.
        """


class RequestQueue(QueueCondition, Protocol):
    """The gateway's side of a broker: entries go in, replies come out."""

    @property
    def near(self) -> NearQueue | None:
        """Queue without a wait, for a gateway in the broker's own process; None for a broker in another one."""

    async def enqueue(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Admit or refuse each entry; the result is in the same order, None for an admitted one.

        An entry that joins another's answer is admitted too, and gets its reply like any other. An entry that is not known
        yet is judged by its limits, then by its dedup keys, then, if it has to run, by whether there is room for it in
        time. Only an admitted entry is charged, to all its limits. One for a model that has no queue is refused.

        An entry that follows a task (`headway.core.dedup.follower`) ends with one reply: the outcome, at once if it is kept,
        or a failure when the task is forgotten or the time of the follower is over. It never runs and leaves the task as it
        is. Without such a task of the tenant's it is refused. Its model is empty where that is not known."""

    async def withdraw(self, submissions: Sequence[Submission], gateway: str) -> None:
        """Let go of submissions of `gateway` that nobody waits for any more; their ids are free. Its own process has offered them.

        A queued one never reaches a GPU, and a running one gets no reply. One that others have joined runs on for them,
        and the first under an idempotency key runs on for later requests with that key. Nothing changes for a
        submission that has its outcome, or for other submissions and gateways under the same id."""

    async def probe(self, gateway: str) -> None:
        """Find out, for a gateway, whether the broker takes changes; none is made."""

    async def takes_reads_only(self) -> bool:
        """Return whether the broker is there but takes no changes just now, as while a replica takes over.

        Asked when changes are not answered. It never raises."""

    async def cancel_task(self, tenant: str, id: str) -> None:
        """Forget a task. Without such a task, nothing happens.

        A task that has not run never does. Its outcome is not kept, and whoever waits for it gets a reply that says so."""

    async def replies(self, gateway: str, after: int) -> tuple[Sequence[Reply], int]:
        """Wait for replies to `gateway` that come after cursor `after` (0 at first). Returns them with the new cursor.

        A call with a cursor acknowledges all replies up to it. A call with the same cursor again repeats them."""

    async def state(self, tenant: str | None, id: str) -> EntryState | None:
        """State of an entry, of whatever tenant without one; None when it has its outcome, or is not known."""

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """Kept outcome of a task, or its state while it has none; None when nothing is known of it."""


class BulkQueue(Protocol):
    """The bulk side of a broker: entries that take empty seats, see `headway.core.bulk`."""

    async def enqueue_bulk(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """Let bulk entries wait, or refuse those that are too many; as `RequestQueue.enqueue`, but for what an entry may ask for.

        Their tier is the number of tiers. A shape other than 0 parts them: those of one shape ride together, and with nobody else.
        They count towards no limit, have no dedup keys, and never expire: whoever offers them withdraws them. One whose batch fails
        ends with a failure, whose reason is the cause; it leaves no dead letter.
        """


class WorkSource(Protocol):
    """The batcher's side of a broker: batches go out, their outcomes come in."""

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        """Claim the batch that leaves now for `slot`, or learn when to claim again."""

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        """Return when a claim by `slot` is worth trying again: on a wake-up, or at `until`, which its last claim returned.

        A wake-up wakes one of several idle slots. A call that is cancelled passes its wake-up on."""

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        """Next batch of each of some slots that share a GPU, for the turns there. Each slot has claimed before."""

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        """End a lease with one item per entry, in order.

        A broker may answer entries with large outputs in atomic steps of their own, before the one that ends the lease.
        """

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        """End a lease without outputs; False when the lease was no longer valid.

        Without a failure the work never started, and nothing is charged. With one, the retry plan decides for each
        entry."""

    async def extend(self, lease: Lease) -> bool:
        """Renew a lease by its full length from now on; False when it was no longer valid."""

    async def heartbeat(self, worker: WorkerInfo) -> None:
        """Record a heartbeat; only healthy workers count as capacity."""


class Registry(Protocol):
    """Figures of the workers and the queues."""

    async def workers(self) -> Sequence[WorkerInfo]:
        """All workers, as they were last heard of."""

    async def depths(self) -> Sequence[TierDepth]:
        """Queue depth by model and tier."""

    async def bulk_queues(self) -> Sequence[BulkDepth]:
        """Bulk entries of each queue that has had any."""

    async def loads(self) -> Mapping[QueueName, Load]:
        """Arrivals, pace and slots of each queue that this broker knows."""


class Maintenance(Protocol):
    """Upkeep of a broker; one process of a fleet does it at a time."""

    async def reap(self, rest: float = 0.0) -> float:
        """Expire what is overdue and take back leases that have ended; returns the seconds until the next call is due.

        Arguments:
            rest: seconds until the next call, about, while nothing is due: what comes meanwhile and is due sooner is reaped by then.
                0: the next call comes soon.
        """

    def know(self, models: Mapping[str, QueueLimits], others: bool = False) -> None:
        """Have queues of these models too, or other bounds; with `others` of any that holds something. Only what holds nothing goes."""


class Broker(RequestQueue, BulkQueue, WorkSource, Registry, Maintenance, Protocol):
    """A broker: holds what waits, hands out the best batch of the instant, and brings answers back.

    The laws, which every broker keeps:

    1. An admitted entry ends in exactly one outcome: answered, failed with a reason, or expired.
       (An entry that was withdrawn ends without a reply.)
    2. Attempts are counted at the claim.
    3. A lease has an owner, a fence and an end; a completion with a dead fence changes nothing.
    4. Releasing undispatched work charges no attempt.
    5. Replies survive a gateway's reconnect.
    6. Enqueue is idempotent by submission (tenant, id, nonce, gateway), and charges a limit once. Another submission under
       an id that is live is a conflict. A reply carries the nonce of the submission that it answers.
    7. Time inside the broker is the broker's own clock.
    8. "Nobody waits here any more" (`withdraw`) and "forget it" (`cancel_task`) are two things. Only the latter ends an
       outcome that is kept. What is withdrawn frees its id; under an idempotency key it runs on.
    """


class Fleet(Protocol):
    """The processes of a fleet, their leader, and the capacities."""

    async def heartbeat(self, member: ProcessInfo) -> Collection[str]:
        """Record that a process lives. Some seconds after its last heartbeat it is forgotten.

        Returns the names of all drains.
        """

    async def leave(self, id: str) -> None:
        """Forget a process at once; if it led, another may."""

    async def depart(self, gone: Departed) -> None:
        """Record an end, for some minutes. One of a process that says nothing any more is recorded without that."""

    async def departed(self) -> Sequence[Departed]:
        """Ends of the last minutes, of a bounded number, also of processes that have come back since."""

    async def members(self) -> Sequence[ProcessInfo]:
        """Processes with a recent heartbeat."""

    async def acquire_leadership(self, candidate: str, seconds: float) -> float:
        """Take the lead of the controllers for `seconds`, or renew it.

        Returns 0; while another controller has it, the seconds until that one's lead ends unless it is renewed.
        """

    async def acquire_load(self, model: str, candidate: str, seconds: float) -> bool:
        """Take the right to load a model for `seconds`, or renew it; False while another process has it."""

    async def publish(self, capacity: Capacity) -> None:
        """Publish the capacity of a model's workers."""

    async def withdraw_capacity(self, model: str) -> None:
        """Forget the capacity of a model that is gone. Of a model without one, nothing happens."""

    async def capacities(self) -> Sequence[Capacity]:
        """Last published capacity of each model."""

    async def rollouts(self) -> Sequence[Rollout]:
        """Last rollout of each model that had one."""

    async def drains(self) -> Sequence[Drain]:
        """Drains that stand."""

    async def drain(self, drains: Sequence[Drain], seen: Collection[str] | None = None) -> bool:
        """Have these drains stand; False, and nothing happens, where `seen` is given, and others stand than those of its names."""

    async def undrain(self, names: Collection[str]) -> None:
        """End the drains of these names."""

    async def keep_rollout(self, rollout: Rollout) -> bool:
        """Keep a rollout in the place of the one before it; False, and nothing happens, where that has another revision than the one before."""


class Board(Protocol):
    """The departure board of a fleet, bounded; the oldest notices go first."""

    async def post(self, notice: Notice) -> Posted:
        """Post a notice; an empty one only asks for the answer."""

    async def history(self) -> tuple[Sequence[HistoryRow], News]:
        """Rows of the last half hour, oldest first, and the whole notices of the last minutes. Waits for nothing.

        The rows count exactly what was posted up to the cursor. The board counts as watched for some seconds.
        """

    async def read(self, after: str) -> News:
        """Notices after a cursor. The board counts as watched for some seconds.

        The call waits for news, though not for long: it may return none.
        """


class DeadLetters(Protocol):
    """Dead letters, bounded; the oldest goes first.

    An entry is known by its tenant and id. An id without a tenant means the entries of all tenants with that id.
    """

    async def add(self, letter: DeadLetter) -> None:
        """Keep a dead letter, in the place of an earlier one of the same entry."""

    async def list(self, limit: int = 100) -> Sequence[DeadLetter]:
        """Newest dead letters, with empty inputs and parameters."""

    async def find(self, id: str, tenant: str | None = None) -> Sequence[DeadLetter]:
        """Dead letters of entry `id`."""

    async def remove(self, id: str, tenant: str | None = None) -> int:
        """Purge the dead letters of entry `id`. Returns their number."""

    async def count(self) -> int:
        """Number of dead letters."""

    async def counts(self) -> Mapping[str, int]:
        """Number of dead letters by model; models without one may be left out."""

    async def totals(self) -> Mapping[str, int]:
        """Number of dead letters ever added, by model, those that replaced another included; may begin anew at 0."""


class Backend(Protocol):
    """Way of one slot to the black box; runs one batch at a time."""

    @property
    def pid(self) -> int:
        """Process id of the child that runs batches; 0 when there is none."""

    @property
    def signature(self) -> Signature:
        """Kinds of values that the target takes and gives, and its example; known once it has been started."""

    @property
    def warm_up(self) -> Sequence[tuple[int, float]]:
        """Sizes and run times in seconds of the batches that the last start has run once the target was warm, if any."""

    async def start(self) -> float:
        """Start the backend, warm-up batch included. Returns the first warm-up's run time in seconds; 0 without one.

        Raises:
            TargetError: the target cannot be loaded, or fails its warm-up batch.
        """

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Run a batch; one item per entry.

        Raises:
            BackendError: the whole batch failed. After WorkerCrashed and BatchTimeout the backend must be started anew.
        """

    async def gone(self) -> None:
        """Return when the child has died or is to be replaced; never, while it is well."""

    async def stop(self) -> None:
        """End the child. Safe to call at any time, more than once."""


class BulkRunner(Protocol):
    """Runner of lines of bulk jobs in seats that would stay empty."""

    async def room(self, model: str) -> int:
        """Wait until lines of a model may be offered. Returns how many."""

    def offer(self, lines: Sequence[BulkLine], done: Callable[[BulkLine, Reply], None]) -> None:
        """Run lines in empty seats.

        Each of them ends with one reply, by an output or a failure. Retries, outages of the broker and the search for bad
        lines are the runner's.
        """

    def withdraw(self, job: str, numbers: Collection[int] = ()) -> None:
        """Let go of a job's lines that have not ended, or of those with these numbers; `done` is not called for them.

        It looks through all lines on their way, so that it is to be called for many at once.
        """

    def full(self, tenant: str) -> bool:
        """Whether so many bytes of a tenant's lines are on their way that no more of them may be offered."""

    def paused(self, model: str, tenant: str = "") -> str:
        """Reason for which nothing of a model, or no line of a tenant, runs at present; empty while it runs."""

    async def look(self) -> None:
        """Learn why lines wait that are on their way, unless that was learnt a moment ago. Raises BrokerUnavailable."""

    def waits(self, model: str, tenant: str) -> tuple[str, float] | None:
        """Reason for which lines of a model and a tenant wait, and the seconds for which they do at most; infinite: nobody can tell.

        None: they run.
        """


class Gpu(Protocol):
    """One GPU, as its driver tells of it; several slots may share it."""

    @property
    def settled(self) -> float:
        """Share of its memory that was in use when the last model had been loaded there, 0 to 1; 0 as long as that is not known."""

    def figures(self) -> GpuFigures | None:
        """Figures that were read last, and not long ago; None where there are none. Waits for nothing."""

    async def look(self) -> GpuFigures | None:
        """Figures that are read now, or the last ones where that takes longer than a second."""

    def loaded(self) -> None:
        """Note that a model has been loaded on this GPU, so that the next reading of its memory shows what the models need."""


class Identity(Protocol):
    """Authentication: from a credential to its principal."""

    def identify(self, authorization: bytes) -> Principal | None:
        """Principal of an `Authorization` header's value (empty: none was sent); None when not valid.

        Raises:
            RequestError: the credential cannot be checked yet; says when to ask again.
        """


@runtime_checkable
class WatchedIdentity(Protocol):
    """Identity that need not look at a credential again which it has found good, for as long as whoever sent it is there."""

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        """Function that answers for this credential as `Identity.identify` would at the time; None where there is none."""


@runtime_checkable
class KeyIdentity(Protocol):
    """Identity of API keys, which can say what a key that came long ago may do now."""

    def principal_of(self, key: str) -> Principal | None:
        """Principal of the key with this id; None when it is not valid.

        Raises:
            RequestError: that cannot be told now.
        """


class KeyMark(msgspec.Struct, frozen=True):
    """One change in the history of a store of keys.

    Attributes:
        revision: number that grows with every change; 0: before the first one.
        mark: random text that tells the change from another of the same revision; empty where it is not known.
    """

    revision: int = 0
    mark: str = ""


class KeyChanges(msgspec.Struct, frozen=True):
    """Keys that have changed since a change.

    Attributes:
        keys: keys as they are now, in the order of their last changes.
        upto: the last of these changes.
        more: whether there may be further ones.
    """

    keys: Sequence[ApiKey]
    upto: KeyMark
    more: bool


class KeyHistory(Protocol):
    """API keys and their changes, as they are read. Each method raises StoreUnavailable when the store does not answer."""

    async def keys(self) -> Sequence[ApiKey]:
        """All keys, ended ones included, oldest first."""

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        """Keys that were added or changed after `since`, at most `limit`.

        None when that change is not, or not for certain, part of the history of what the store holds now. Then all keys
        are to be read again, from KeyMark().
        """

    async def latest(self) -> KeyMark:
        """Return the last change."""


class KeyStore(KeyHistory, Protocol):
    """Store of API keys. Each method raises StoreUnavailable when the store does not answer."""

    async def open(self) -> None:
        """Reach the store, and bring its tables up to date. Raises SettingError when it cannot be used."""

    async def add(self, key: ApiKey) -> None:
        """Add a new key. Raises ValueError when its id is taken, or when the key it replaces has a living replacement."""

    async def get(self, id: str) -> ApiKey | None:
        """Key of an id."""

    async def expire(self, id: str, at: float) -> bool:
        """End a key at Unix time `at`, or when it would end anyway if that is sooner; False for an unknown id."""

    async def remove_ended(self, before: float, limit: int) -> int:
        """Remove at most `limit` keys that ended, and were last changed, before Unix time `before`; returns their number.

        No change tells of it, as these keys were refused already."""

    async def close(self) -> None:
        """Close the store."""


class Ledger(Protocol):
    """Ledger, with a record of every request. Each method raises StoreUnavailable when the store does not answer."""

    async def open(self) -> None:
        """Reach the store, and bring its tables up to date. Raises SettingError when it cannot be used."""

    async def write(self, records: Sequence[LedgerRecord]) -> None:
        """Keep records, all or none; one that is there already, by (tenant, id, completed_at), is left."""

    async def note_open(self, records: Sequence[LedgerRecord], ended: Sequence[tuple[str, str]]) -> None:
        """Forget requests (tenant, id) that were noted as without an outcome, then note these; those that were are as new."""

    async def find(self, id: str) -> Sequence[LedgerRecord]:
        """Records of a request id, of all tenants; those without an outcome come last."""

    async def prune(self, before: float, limit: int) -> int:
        """Remove at most `limit` records completed before Unix time `before`, and open ones that old. Returns their number."""

    async def close(self) -> None:
        """Close the ledger."""


class BulkStore(Protocol):
    """Store of bulk jobs and of their files' names. Each method raises StoreUnavailable when the store does not answer.

    A tenant's ids are unknown to others. Leases go by the store's own clock.
    """

    async def open(self) -> None:
        """Reach the store, and bring its tables up to date. Raises SettingError when it cannot be used."""

    async def add_file(self, file: BulkFile, most: Stored | None = None, holder: BulkJob | None = None) -> bool:
        """Add a file, of which there may be one under its id.

        False when its tenant would have more than `most`, or when another generation holds the job than `holder`'s."""

    async def file(self, tenant: str, id: str) -> BulkFile | None:
        """File of an id."""

    async def files(self, tenant: str, after: str, limit: int, purpose: str = "") -> Sequence[BulkFile]:
        """Newest files of a tenant, of a purpose if one is given; those older than the file `after`, where that is given."""

    async def stored(self, tenant: str) -> Stored:
        """Files of a tenant, all together."""

    async def remove_file(self, tenant: str, id: str) -> bool:
        """Forget a file; False for one that is not there, or that a job reads which has not ended."""

    async def old_files(self, before: float, limit: int) -> Sequence[BulkFile]:
        """Oldest files from before Unix time `before`, of all tenants, but for those that jobs read."""

    async def file_ids(self, after: str, limit: int) -> Sequence[str]:
        """Ids of the files of all tenants in their order, from behind `after`."""
        ...

    async def add_job(self, job: BulkJob, most: int, most_ended: int = MOST_ENDED) -> bool:
        """Add a job; False when its tenant would have more than `most` that have not ended.

        Of those that have ended the tenant keeps the newest `most_ended`."""

    async def job(self, tenant: str, id: str) -> BulkJob | None:
        """Job of an id."""

    async def jobs(self, tenant: str, after: str, limit: int) -> Sequence[BulkJob]:
        """Newest jobs of a tenant; those older than the job `after`, where that is given."""

    async def open_jobs(self, after: str, limit: int) -> Sequence[BulkJob]:
        """Jobs of all tenants that have not ended, in the order of their ids, from behind `after`."""
        ...

    async def cancel(self, tenant: str, id: str) -> BulkJob | None:
        """Wish that a job ends, which changes nothing for one that has ended. Returns the job."""

    async def claim(self, owner: str, seconds: float, share: int) -> BulkJob | None:
        """Hold the oldest job that nobody holds, of a tenant with fewer than `share` that are held; None: there is none.

        The lease lasts for `seconds`, and the job has its next generation.
        """

    async def keep(self, job: BulkJob, seconds: float) -> BulkJob | None:
        """Write what has become of a held job, and hold it for `seconds` from now; 0: no longer.

        Returns the job, with the client's wish as it is now; None, and nothing is written, when another generation
        holds it.
        """

    async def remove_jobs(self, before: float, limit: int) -> int:
        """Forget at most `limit` jobs from before Unix time `before` that have ended. Returns their number."""

    async def counts(self) -> Mapping[str, int]:
        """Number of jobs by status."""

    async def close(self) -> None:
        """Close the store."""
