"""Naive models of what a broker has admitted, leased and answered, and of inputs that failed alone. The state machines
check each answer of a broker against them."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from headway import errors
from headway.core import ratelimit
from headway.core.failures import CULPRIT
from headway.core.queue_limits import QueueLimits
from headway.core.retry import SEARCHED
from headway.core.suspects import KNOWN_SECONDS
from headway.model import Cause, Entry, EntryState, Failure, Lease, QueueName, Reply, Submission, TierDepth
from tests.contracts.brokers import LIMITS, MOST_ATTEMPTS, QUEUES, output


def key(entry: Entry | Reply) -> Submission:
    return entry.tenant, entry.id, entry.nonce


def uncharged(entry: Entry) -> Entry:
    """The entry without limits, digest and shape. Workers don't need these, so a broker may drop them."""
    return msgspec.structs.replace(entry, limits=(), digest=b"", shape=0)


class Waiting:
    def __init__(self, entry: Entry, since: float) -> None:
        self.entry = entry
        self.since = since
        self.cancelled = False
        self.failed_with: tuple[Submission, ...] = ()
        self.claims = 0


class Held:
    def __init__(self, lease: Lease, expires_at: float) -> None:
        self.lease = lease
        self.expires_at = expires_at


LIMIT_RATE, LIMIT_BURST = 600.0, 12.0
"""Requests per minute and burst of a rate-limited tenant."""
MODEL_RATE, MODEL_BURST = 300.0, 8.0
"""Requests per minute and burst of such a tenant for one model."""
ROUNDING = 1e-3
"""Seconds by which a broker may round a debt."""


class BrokerModel:
    """What a test knows about a broker. Times are on its clock. Tests take the leases that they use out of `leases`;
    `failed` holds the submissions that may be blamed for a failure."""

    def __init__(self) -> None:
        self.bounds: Mapping[str, QueueLimits] = QUEUES
        self.let_in: dict[Submission, Waiting] = {}
        self.latest: dict[tuple[str, str], Submission] = {}
        self.outcomes: dict[Submission, Reply] = {}
        self.leases: list[Held] = []
        self.dead: list[Held] = []
        self.culprits = Culprits()
        self.failed: set[Submission] = set()
        self.several: list[tuple[Submission, ...]] = []
        self._paid_until: dict[str, float] = {}
        self._last_fence: dict[str, int] = {}

    def offered(self, entry: Entry, verdict: Failure | None, now: float) -> None:
        """Check the verdict on a new entry, and record the entry if it was admitted."""
        if self.culprits.judge(entry, verdict, now):
            return
        if verdict is None:
            self.let_in[key(entry)] = Waiting(entry, now)
            self.latest[entry.tenant, entry.id] = key(entry)
        else:
            assert verdict.code in (errors.SHED, errors.SERVICE_OVERLOADED)
            assert verdict.retry_after is not None
            assert verdict.retry_after > 0.0

    def offered_several(self, parts: Sequence[Entry], verdicts: Sequence[Failure | None], now: float) -> bool:
        """Check the verdicts on the parts of one request, whose first part pays for all; True if all were admitted. The
        request is charged to both its limits, and only if the first part is admitted and it fits both."""
        first, verdict = parts[0], verdicts[0]
        debts = {limit: self._debt(limit.id, now) + ratelimit.interval(limit) for limit in first.limits}
        over = {limit.name for limit, debt in debts.items() if debt > ratelimit.tolerance(limit) - ROUNDING}
        within = all(debt <= ratelimit.tolerance(limit) + ROUNDING for limit, debt in debts.items())
        assert all(one is None or one.code != errors.RATE_LIMITED for one in verdicts[1:])
        if verdict is not None and verdict.code == errors.RATE_LIMITED:
            assert over
            assert ("to the model" in verdict.message and "model" in over) or "user" in over
        else:
            self.offered(first, verdict, now)
            if verdict is None:
                assert within
                for limit, debt in debts.items():
                    self._paid_until[limit.id] = now + debt
        for part, told in zip(parts[1:], verdicts[1:], strict=True):
            self.offered(part, told, now)
        self.several.append(tuple(key(part) for part, told in zip(parts, verdicts, strict=True) if told is None))
        return not any(verdicts)

    def _debt(self, limit: str, now: float) -> float:
        return max(self._paid_until.get(limit, now) - now, 0.0)

    def abandoned(self, parts: Sequence[Submission]) -> bool:
        outcomes = [self.outcomes.get(part) for part in parts]
        return any(one is not None and one.failure is not None for one in outcomes) and None in outcomes

    def claimed(self, lease: Lease, model: str, limit: int, now: float, lease_seconds: float) -> None:
        """Check and record a lease: its entries were waiting, in time, within its limit, and may share a batch."""
        assert 1 <= len(lease.entries) <= limit
        weight = sum(entry.weight for entry in lease.entries)
        assert weight <= limit * self.bounds[model.partition("@")[0]].unit or len(lease.entries) == 1
        assert lease.fence > self._last_fence.get(model, 0)
        self._last_fence[model] = lease.fence
        keys = tuple(map(key, lease.entries))
        assert len(set(keys)) == len(keys)
        busy = {key(rider) for held in self.leases if held.expires_at > now for rider in held.lease.entries}
        apart = lease.reason in ("retry", "apart")
        pasts, riders = set(), [uncharged(entry) for entry in lease.entries]
        for rider in keys:
            known = self.let_in[rider]
            assert uncharged(known.entry) in riders
            assert str(known.entry.queue) == model
            assert not known.cancelled
            assert rider not in self.outcomes
            assert rider not in busy
            assert now < known.since + known.entry.timeout
            # An entry in its caller's quarantine counts as having run once any other entry there has.
            assert known.claims or apart or now < known.since + known.entry.queue_timeout
            pasts.add(known.failed_with)
            known.claims += 1
            assert known.claims <= 3 * MOST_ATTEMPTS  # Entries pooled with other culprits run again with them.
        assert len({self.let_in[rider].entry.shape for rider in keys}) == 1
        assert lease.time_left <= min(self.let_in[rider].entry.timeout for rider in keys) + 1e-6
        if apart:  # They failed together, or belong to one caller.
            callers = {(rider.tenant, rider.caller) for rider in lease.entries}
            assert len(callers) == 1 or (len(pasts) == 1 and set(keys) <= set(*pasts))
        else:
            assert pasts == {()}
        self.leases.append(Held(lease, now + lease_seconds))

    def settled(self, held: Held, valid: bool, now: float) -> None:
        """Law 3: a lease is valid until it expires. One that was taken back isn't."""
        assert valid or held.expires_at <= now
        self.dead.append(held)
        if not valid:
            self.failed_together(held)

    def failed_together(self, held: Held, places: Sequence[int] = ()) -> None:
        """From now on the entries of a lease may share a batch; `places` are those of the failed call, kept apart."""
        riders = list(map(key, held.lease.entries))
        if any(rider.tier >= LIMITS.tiers for rider in held.lease.entries):
            places = ()  # Those are suspects; all others run again together.
        of_call = [rider for place, rider in enumerate(riders) if not places or place in places]
        others = [rider for rider in riders if rider not in of_call]
        for part in (of_call, others):
            for rider in part:
                known = self.let_in[rider]
                known.failed_with = (
                    tuple(part) if known.entry.tier < LIMITS.tiers else ()
                )  # Bulk entries end, or start afresh.
        for rider in others:
            self.let_in[rider].claims -= 1

    def given_back(self, held: Held) -> None:
        self.failed_together(held)
        for rider in held.lease.entries:
            self.let_in[key(rider)].claims -= 1

    def answered(self, reply: Reply, gateway: str) -> None:
        """Law 1: each entry gets one outcome, its own, at the gateway that waits for it."""
        known = self.let_in[key(reply)]
        assert known.entry.gateway == gateway
        assert not known.cancelled
        assert self.outcomes.setdefault(key(reply), reply) == reply
        assert (reply.output is None) != (reply.failure is None)
        assert reply.attempts <= MOST_ATTEMPTS
        if reply.output is not None:
            assert reply.output == output(known.entry.input)
            assert reply.ran is not None
        elif reply.failure is not None:
            assert reply.failure.code in (
                errors.REJECTED_BY_MODEL,
                errors.BACKEND_ERROR,
                errors.DEADLINE_EXCEEDED,
                errors.NO_WORKERS,
            )
            assert reply.failure.code != errors.REJECTED_BY_MODEL or key(reply) in self.failed

    def everything_is_somewhere(
        self, states: Mapping[Submission, EntryState | None], depths: Sequence[TierDepth], now: float
    ) -> None:
        """Every admitted entry waits, runs or has its outcome. Depths count what waits, leases what runs."""
        waiting = [one for one, state in states.items() if state is EntryState.QUEUED]
        running = {one for one, state in states.items() if state is EntryState.PROCESSING}
        counted = Counter((self.let_in[one].entry.queue, self.let_in[one].entry.tier) for one in waiting)
        for queue, tier in [one for one in counted if one[1] >= LIMITS.tiers]:  # Depths leave out bulk entries.
            del counted[queue, tier]
        told = Counter[tuple[QueueName, int]]()
        for one in depths:
            told[one.queue, one.tier] += one.depth
        assert +told == counted
        leased = {key(rider) for held in self.leases for rider in held.lease.entries}
        certain = {key(rider) for held in self.leases if held.expires_at > now for rider in held.lease.entries}
        gone = {one for one, known in self.let_in.items() if known.cancelled} | set(self.outcomes)
        assert certain - gone <= running <= leased
        assert not (set(waiting) | running) & gone

    def everything_has_ended(self) -> None:
        """No lease is left, and every entry that wasn't withdrawn has an outcome."""
        assert not self.leases
        expected = {one for one, known in self.let_in.items() if not known.cancelled}
        assert set(self.outcomes) == expected


BOUNDARY = 0.01
"""Seconds by which a culprit may be forgotten early or late."""


class Culprits:
    """Inputs that failed alone, by model and tenant. Those that only raised may be forgotten when workers change."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], tuple[float, bool, int]] = {}
        self._doubtful: dict[tuple[str, str, str], float] = {}
        self._changes = 0

    def found(self, entry: Entry, cause: Cause, now: float) -> None:
        self._found[_asked(entry)] = now, cause not in SEARCHED, self._changes

    def perhaps(self, entry: Entry, now: float) -> None:
        self._doubtful[_asked(entry)] = now

    def workers_changed(self) -> None:
        self._changes += 1

    def judge(self, entry: Entry, verdict: Failure | None, now: float, *, runs: bool = True) -> bool:
        """Check a verdict; True if it rejects a known culprit. `runs`: no stored answer or other run can serve it."""
        told = verdict is not None and verdict.reason == CULPRIT
        found_at, killed, changes = self._found.get(_asked(entry), (-KNOWN_SECONDS, False, 0))
        ends = found_at + KNOWN_SECONDS
        if told:
            assert verdict is not None
            assert verdict.code == errors.REJECTED_BY_MODEL
            assert entry.caller, "a replay runs"
            ends = max(ends, self._doubtful.get(_asked(entry), -KNOWN_SECONDS) + KNOWN_SECONDS)
            assert now < ends + BOUNDARY, "this tenant's input has not failed alone of late"
        elif runs and entry.caller and (killed or changes == self._changes):
            assert now > ends - BOUNDARY, "a known culprit is let in"
        return told


def _asked(entry: Entry) -> tuple[str, str, str]:
    return str(entry.queue), entry.tenant, str(entry.input)
