"""One model's queue, in which batches are formed.

It doesn't read a clock or use asyncio. A broker adds leases and replies to it, and the simulator drives it in virtual time. All
times passed in must come from one clock, and must never go back.

    offer ──▶ waiting ──depart──▶ running ──finish──▶ gone
                 ▲  │                │
                 │  └─expire/cancel─▶gone
                 └──── fail (retry plan) / hand_back (uncharged)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence, Set
from itertools import compress, islice
from operator import attrgetter, ne

from headway.core import admission
from headway.core.admission import MIN_WAIT
from headway.core.budget import GREED
from headway.core.bulk import BATCHES_WAITING, BulkClass, Forecast, seats
from headway.core.departure import (
    APART,
    BULK,
    LEEWAY,
    RETRY,
    Departure,
    FailureOutcome,
    Hold,
    Load,
    Past,
    Policy,
    QueueSnapshot,
    Rule,
    RunningBatches,
    decide,
)
from headway.core.fair_queue import (
    BATCH_PAGES,
    GONE,
    LOOK_AHEAD,
    MEAN_WEIGHT,
    QUEUED,
    RETRYING,
    RUNNING,
    DeadlineQueue,
    QueuedEntry,
    TierQueue,
    queued_at,
)
from headway.core.packing import Nearness, Terms, pack, pack_nearest
from headway.core.queue_limits import QueueLimits
from headway.core.retry import BLAMED, NEVER_SPLIT, SEARCHED, RetryBudgets, Rng, backoff, is_over, stays_whole
from headway.core.service_model import ArrivalRate, ServiceModel
from headway.core.slot_factors import PADDED_DOUBT, SlotFactors
from headway.core.suspects import (
    APART_PRICE,
    FIRST,
    LONE_ROOM,
    QUARANTINE,
    CallerKey,
    Choice,
    Culprits,
    Group,
    Suspects,
    caller_of,
)
from headway.model import MOST_OUTPUT, Cause, Entry

WAIT_WEIGHT = 0.2  # Weight of the newest departure in the average wait.
MIN_AVOIDANCE = 0.05  # Shortest time in seconds for which a failed batch waits for another worker.
GATE_AGE = 0.05  # Seconds after which the admission limits are recomputed even if no batch has left.
UNKNOWN_WAIT = 1.0  # Seconds that a refused client is asked to wait while the model's pace is unknown.
QUARANTINE_BATCHES = 8  # Limit on a caller's quarantine while others wait, in batches per GPU.
QUARANTINE_ALONE = 2048  # The same in entries while nobody else waits, if more. With Redis, a step reads them all.
NEAR_BATCHES = 8  # Full batches of waiting entries searched for the nearest, or for callers that run apart.
SEARCH_LOAD = 2  # An entry in a quarantine counts as this many, because it may fail and run again.
MOST_KINDS = 64  # Limit on the kinds of entries in `_sure`, by tier and timeouts.
MIXED_SECONDS = 1.0  # BATCH_PAGES limits batches for this many seconds after two tenants' entries came in a row.
_TENANT, _TIER = attrgetter("entry.tenant"), attrgetter("entry.tier")
_ARRIVED, _STATE, _WEIGHT = attrgetter("arrived"), attrgetter("state"), attrgetter("weight")
_NOTHING = Choice()
RULE_AGE = 0.01  # Seconds after which `wake` asks the policy for a new rule instead of using the last claim's.


class ModelQueue:
    """The waiting and retried entries of one model, with its measured cost and load."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.service = ServiceModel()
        self.last_departure = -math.inf
        self._schedule = -math.inf
        self._newest = -math.inf
        self.slots = 0
        self.factors = SlotFactors()
        self.whole_slots = 1.0
        self._tier_queues = [TierQueue() for _ in range(limits.tiers)]
        self._rates = [ArrivalRate() for _ in range(limits.tiers)]
        self._due = DeadlineQueue()
        self._crowded = limits.max_queue * GREED // (GREED + 1)  # With more waiting entries, shares are limited.
        self._waiting: Counter[str] | None = None  # Waiting entries by tenant. None while this isn't needed.
        self._last_tenant: str | None = None
        self._mixed_at = -math.inf  # Time of the last entry whose tenant differed from that of the entry before it.
        self._fresh = 0
        self._coming: list[QueuedEntry] = []  # Entries admitted by `offer_small` that have no place yet.
        # By tier and timeouts: `offer` must judge an entry if `_coming` with it would be this long. It adds `count`.
        self._sure: dict[tuple[int, float, float], float] = {}
        self._sure_until = -math.inf  # Time until which `_sure` is valid.
        self.bulk: BulkClass | None = None  # Bulk entries, once there have been any.
        self.culprits = Culprits()
        self._suspects = Suspects()
        self._budgets = RetryBudgets(limits.max_batch)
        self._gate = admission.AdmissionLimits.unknown(limits.tiers)
        self._gate_at = -math.inf
        self._running = RunningBatches()
        self._past = _past_of(limits)
        self._wait = 0.0
        self._departures = 0
        self._policy: Policy | None = None
        self._limit = limits.max_batch
        self._weighs, self._sheds = limits.weighs, limits.shed_at is not None
        self._owed = 0.0  # Weight that was reserved for lower tiers but that they didn't get.
        self._rule = Rule(limits.max_batch)
        self._rule_at = -math.inf

    @property
    def depth(self) -> int:
        """Number of waiting entries, including failed ones that will run again."""
        return self._fresh + len(self._coming) + len(self._suspects.of)

    def depths(self, now: float) -> list[tuple[int, float]]:
        """Return, for each tier, the number of waiting entries and the seconds that the oldest has waited."""
        self._take_in()
        counts = [tier_queue.depth for tier_queue in self._tier_queues]
        oldest = [now if (first := tier_queue.oldest()) is None else first.arrived for tier_queue in self._tier_queues]
        for member in self._suspects.of:
            counts[member.entry.tier] += 1
            oldest[member.entry.tier] = min(oldest[member.entry.tier], member.arrived)
        return [(count, now - since) for count, since in zip(counts, oldest, strict=True)]

    def set_slots(self, slots: int, workers: Collection[str] = (), whole: float = math.inf, now: float = 0.0) -> None:
        """Set the number of live GPUs. `whole` is their total in whole GPUs, because some may be shared. `workers` are those
        whose factors are learnt."""
        if slots != self.slots:
            self.culprits.renew(now)
        self.factors.keep(slots, workers, self._departures)
        before, self.slots = (self.slots, self.whole_slots), slots
        self.whole_slots = min(slots, whole) or self.whole_slots
        if (slots, self.whole_slots) != before:
            self._rejudge()

    def bound(self, limits: QueueLimits) -> None:
        """Start or stop limiting batches by weight. All other limits must stay the same. Waiting entries keep their weights."""
        self._take_in()
        for tier_queue in self._tier_queues:
            tier_queue.shaped = True
        self.limits = limits
        self._weighs = limits.weighs
        self._past = _past_of(limits)
        self._owed, self._rule_at = 0.0, -math.inf
        self._rejudge()

    def offer(self, entry: Entry, now: float) -> QueuedEntry | admission.Refused:
        self._take_in()
        tier = entry.tier
        tier_queue = self._tier_queues[tier]
        self._rates[tier].observe(1, now)
        if self._weighs:
            tier_queue.shaped = entry.shape > 0 or (tier_queue.shaped and tier_queue.depth > 0)
            tier_queue.mean += (self.limits.weight(entry) - tier_queue.mean) * (MEAN_WEIGHT if tier_queue.mean else 1.0)
        if self.culprits.active and self.culprits.rides_apart(caller_of(entry), now):
            return self._offer_apart(entry, now)
        if self._fresh >= self._crowded and self._has_its_share(entry.tenant):
            pace = self._gate_now(now).pace(tier)
            return admission.Refused(max(1.0 / pace, MIN_WAIT) if pace > 0.0 else UNKNOWN_WAIT, tier_only=False)
        if self._sheds and (over := self.limits.shed(tier, self._fresh)) > 0:
            pace = self._gate_now(now).pace(0)
            return admission.Refused(max(over / pace, MIN_WAIT) if pace > 0.0 else UNKNOWN_WAIT, tier_only=True)
        if self._fresh or entry.count > 1:
            ahead: float = tier_queue.depth
            for above in self._tier_queues[:tier]:
                ahead += above.depth
            if self._weighs:
                ahead = self._size_of(self._tier_queues[: tier + 1])
            if entry.count > 1:
                ahead += self.limits.others(entry)
            if ahead:
                gate = self._gate if now - self._gate_at <= GATE_AGE else self._gate_now(now)
                stretch, bound = 1.0, gate.bound(tier, entry)
                if entry.shape and tier_queue.depth and ahead * self.limits.max_batch >= bound:
                    stretch = self._stretch(tier_queue, entry.tenant)
                    ahead += (stretch - 1.0) * self._size_of((tier_queue,))
                if ahead >= bound and (refused := self._judged(entry, ahead, now, stretch)) is not None:
                    return refused
        self._newest = now
        if entry.tenant != self._last_tenant:
            if self._last_tenant is not None:
                self._mixed_at = now
            self._last_tenant = entry.tenant
        queued = self._queued(entry, now) if self._weighs else queued_at(entry, now)
        tier_queue.push(queued)
        self._due.push(queued)
        self._fresh += 1
        if self._waiting is not None:
            self._waiting[entry.tenant] += 1
        return queued

    def offer_small(self, entry: Entry, now: float, held: object = None) -> QueuedEntry | None:
        """Fast path: admit a small plain entry that can't be refused. Returns None if `offer` has to judge it. Such entries get
        their places together, the next time that the queue is used. For `held`, see QueuedEntry."""
        timeout = entry.timeout
        queue_timeout = entry.queue_timeout
        most = self._sure.get((entry.tier, queue_timeout, timeout))
        if most is None or now > self._sure_until:
            most = self._find_sure(entry, now) if self._coming or self._fresh else 1.0
        if len(self._coming) + entry.count >= most:
            return None
        queue_due = now + (queue_timeout if queue_timeout < timeout else timeout)
        queued = QueuedEntry(entry, now, now + timeout, queue_due, 1, 1, held)
        self._coming.append(queued)
        return queued

    def offer_bulk(self, entry: Entry, now: float) -> QueuedEntry | None:
        """Admit a bulk entry; see `core.bulk`. Returns None if enough are waiting. Its sender must watch its deadline."""
        bulk = self.bulk
        if bulk is None:
            bulk = self.bulk = BulkClass(self.limits.delayed, self.limits.max_batch)
        if bulk.depth >= BATCHES_WAITING * self.limits.max_batch * max(self.slots, 1):
            return None
        queued = self._queued(entry, now)
        bulk.push(queued)
        return queued

    def _find_sure(self, entry: Entry, now: float) -> float:
        """Compute the limit in `_sure` for entries with this one's tier and timeouts. Stores and returns it."""
        if now > self._sure_until or len(self._sure) >= MOST_KINDS:
            self._take_in()
            self._sure.clear()
        most = 0.0
        if not (self.limits.unit < 1.0 or self._sheds or self.culprits.active):
            gate, most = self._gate_now(now), float(self._crowded - self._fresh)
            if gate.batch_seconds > 0.0:
                tier_queues = self._tier_queues[: entry.tier + 1]
                ahead = self._size_of(tier_queues) if self._weighs else sum([queue.depth for queue in tier_queues])
                most = min(most, gate.allowed(entry.tier, entry) - ahead)
        self._sure[entry.tier, entry.queue_timeout, entry.timeout] = most = most + 1.0
        self._sure_until = self._gate_at + GATE_AGE
        return most

    def _take_in(self) -> None:
        coming = self._coming
        if not coming:
            return
        self._coming = []
        self._sure.clear()
        tenants, tiers = list(map(_TENANT, coming)), list(map(_TIER, coming))
        before = [tenants[0] if self._last_tenant is None else self._last_tenant, *tenants]
        if mixed := list(compress(coming, map(ne, tenants, before))):
            self._mixed_at = mixed[-1].arrived
        self._last_tenant, self._newest = tenants[-1], coming[-1].arrived
        for tier in sorted(set(tiers)):
            entries = coming if tiers.count(tier) == len(tiers) else list(compress(coming, map(tier.__eq__, tiers)))
            self._rates[tier].observe_each(list(map(_ARRIVED, entries)))
            if self._weighs:
                self._weigh_ones(entries, self._tier_queues[tier])
            self._tier_queues[tier].push_all(entries)
        self._due.push_all(coming)
        self._fresh += len(coming)
        if self._waiting is not None:
            self._waiting.update(tenants)

    def _weigh_ones(self, entries: Sequence[QueuedEntry], tier_queue: TierQueue) -> None:
        tier_queue.shaped = tier_queue.shaped and tier_queue.depth > 0
        cost = self.limits.cost(entries[0].entry)
        for queued in entries:
            queued.cost = cost
        tier_queue.mean = (
            1.0 + (tier_queue.mean - 1.0) * (1.0 - MEAN_WEIGHT) ** len(entries) if tier_queue.mean else 1.0
        )

    def _rejudge(self) -> None:
        self._gate_at = self._sure_until = -math.inf

    def _queued(self, entry: Entry, now: float) -> QueuedEntry:
        if not self._weighs:
            return queued_at(entry, now)
        return queued_at(entry, now, self.limits.cost(entry), self.limits.weight(entry))

    def _has_its_share(self, tenant: str) -> bool:
        """Return True if the queue is full, or if another entry would put the tenant above GREED times the places left; see
        `core.budget`."""
        if self._waiting is None:
            self._waiting = sum((tier_queue.counted() for tier_queue in self._tier_queues), Counter())
        left, waits = self.limits.max_queue - self._fresh - 1, self._waiting[tenant]
        return left < 0 or (waits > 0 and waits + 1 > GREED * left)

    def _discount(self, left: Sequence[QueuedEntry], waits: Counter[str]) -> None:
        for queued in left:
            waits[queued.entry.tenant] -= 1
        if self._fresh < self._crowded // 2:  # Then it is cheaper to count again later than to keep counting.
            self._waiting = None

    def _offer_apart(self, entry: Entry, now: float) -> QueuedEntry | admission.Refused:
        """Admit an entry to its caller's quarantine, which has a share of the GPUs, or refuse it if the quarantine is full."""
        caller, suspects, gate = caller_of(entry), self._suspects, self._gate_now(now)
        quarantine, tenants = suspects.quarantine(caller), self._tenants()
        waiting = self.limits.others(entry) + (self._size(quarantine.members) if quarantine is not None else 0)
        alone, size = not tenants and not suspects.beside(caller), self.limits.size(1, self.limits.weight(entry))
        bound = QUARANTINE_BATCHES * self.limits.max_batch * self.whole_slots
        if alone:
            bound = max(bound, min(self._crowded, QUARANTINE_ALONE) * size)
        load = SEARCH_LOAD * (suspects.callers + tenants) / suspects.callers
        refused = gate.judge(math.floor(load * waiting), self._first_size(), entry.tier, entry)
        if refused is not None or waiting >= bound:
            pace = gate.pace(entry.tier)
            in_time = gate.most(entry, SEARCH_LOAD * size)
            most = max(int(min(bound / size, in_time)), 1)
            above = refused.wait if refused is not None else 0.0
            wait = max(above, load * (waiting - bound + 1.0) / pace, MIN_WAIT) if pace > 0.0 else UNKNOWN_WAIT
            return admission.Refused(
                wait, tier_only=False, most=0 if entry.count <= most else most if in_time > 0 else -most, apart=True
            )
        queued = self._queued(entry, now)
        gathered = Group([], now + self.service.seconds(1), QUARANTINE)
        suspects.join(caller, [queued], gathered, self._group_size(caller))
        return queued

    def _group_size(self, caller: CallerKey, room: int = MOST_OUTPUT) -> int:
        return self.culprits.group_size(caller, self.limits.max_batch, self.service.each, room)

    def _size(self, members: Sequence[QueuedEntry]) -> float:
        if not self._weighs:
            return len(members)
        return self.limits.size(len(members), sum(member.weight for member in members))

    def _first_size(self) -> float:
        first = self._tier_queues[0]
        return self.limits.size(first.depth, first.weight) if self._weighs else first.depth

    def _size_of(self, tier_queues: Sequence[TierQueue]) -> float:
        return self.limits.size(
            sum([queue.depth for queue in tier_queues]), sum([queue.weight for queue in tier_queues])
        )

    def _tenants(self) -> int:
        return sum(tier_queue.tenants for tier_queue in self._tier_queues)

    def _stretch(self, tier_queue: TierQueue, tenant: str) -> float:
        """Return the factor by which entries take longer than their size suggests, because each batch has only one shape. It is
        the smaller of two factors: one for the tenant's next entries, and one for all next entries. Tenants that share a batch
        share its time."""
        full, limits = self.service.seconds(self.limits.max_batch), self.limits
        if full <= 0.0:
            return 1.0
        sizes, own = dict[int, float](), dict[int, float]()
        for queued in islice(tier_queue.in_turn(), LOOK_AHEAD):
            shape, size = queued.entry.shape, limits.size(1, queued.weight)
            sizes[shape] = sizes.get(shape, 0.0) + size
            own[shape] = own.get(shape, 0.0) + (size if queued.entry.tenant == tenant else 0.0)
        takes = takes_own = 0.0
        for shape, size in sizes.items():
            batches = math.ceil(size / limits.max_batch)
            seconds = batches * self.service.seconds(size / batches)
            takes += seconds
            takes_own += seconds * own[shape] / size
        each = takes / sum(sizes.values())
        if takes_own:
            each = min(each, takes_own / sum(own.values()))
        return max(each * limits.max_batch / full, 1.0)

    def _judged(self, entry: Entry, ahead: float, now: float, stretch: float) -> admission.Refused | None:
        """Return the refusal of an entry, or None to admit it. All entries in its tier and above count as ahead of it. If these
        are too many, it is judged again without the entries of its tier that are served after it, which are assumed to have the
        tier's average weight. An entry that fits on free GPUs is admitted."""
        gate = self._gate_now(now)
        if self.limits.fits(ahead, entry, self.whole_slots - self._running.busy):
            return None
        tier_queue, first = self._tier_queues[entry.tier], self._first_size()
        refused = gate.judge(ahead, first, entry.tier, entry)
        if refused is not None and (served_before := tier_queue.ahead(entry.tenant)) < tier_queue.depth:
            after = tier_queue.depth - served_before
            ahead -= stretch * self.limits.size(after, tier_queue.weight / tier_queue.depth * after)
            refused = gate.judge(ahead, first, entry.tier, entry)
        if refused is not None and entry.count > 1:
            size = self.limits.size(1, self.limits.weight(entry))
            batch = self.limits.max_batch / size  # A last, partial batch takes just as long.
            in_time = gate.most(entry, size)
            whole = max(in_time // batch, self.whole_slots) * batch
            if entry.count > (most := max(int(whole), 1)):
                return admission.Refused(refused.wait, tier_only=False, most=most if in_time > 0 else -most)
        return refused

    def load(self, now: float, past: Past | None = None) -> Load:
        self._take_in()
        rate = sum(arrivals.at(now) for arrivals in self._rates)
        return Load(
            rate=rate,
            alpha=self.service.alpha,
            beta=self.service.beta,
            slots=self.slots,
            max_batch=self._limit,
            depth=self._fresh,
            utilisation=self._running.utilisation,
            wait=self._wait,
            departures=self._departures,
            deviation=self.service.deviation,
            largest=self.service.largest,
            entry_size=self._entry_size(rate, now, past) if self._weighs and rate > 0.0 else 1.0,
            paces=self.factors.paces(),
            past=past,
        )

    def _entry_size(self, rate: float, now: float, past: Past | None) -> float:
        """Return the mean size of arriving entries, and record it in `past`."""
        each = sum(self._sizes([arrivals.at(now) for arrivals in self._rates])) / rate
        if past is not None:
            past.each = max(each, 1.0)
        return each

    def _sizes(self, rates: list[float]) -> list[float]:
        if not self._weighs:
            return rates
        return [rate * self.limits.size(1, queue.mean) for rate, queue in zip(rates, self._tier_queues, strict=True)]

    def depart(self, worker: str, limit: int, policy: Policy, now: float) -> Departure | Hold:
        """Return the batch of at most `limit` entries that leaves now for a free GPU, or a Hold. Call `expire` first."""
        limit = min(limit, self.limits.max_batch)
        choice = self._suspects.choose(worker, self.slots > 1, now) if self._suspects.groups else _NOTHING
        if choice.first is not None:
            return self._depart_apart(worker, choice.first, limit, now)
        self._policy, self._limit = policy, limit
        verdict = decide(self._new_rule(policy, now), self._view(worker), now)
        waits = isinstance(verdict, Hold)
        if choice.turn is not None and (waits or self._suspects.credit >= 0.0):
            price = 0.0 if waits else self._price(choice.turn, now)
            return self._depart_apart(worker, choice.turn, limit, now, price)
        if isinstance(verdict, Hold):
            if self.bulk is not None:
                return self._depart_whole(self.bulk, worker, limit, min(verdict.until, choice.again), now)
            return Hold(min(verdict.until, choice.again))
        tenants = self._tenants() if choice.turn is not None else 0
        departure = Departure(worker, [], verdict.reason, now)
        if self.bulk is not None:
            self._charge_delay(self.bulk, worker, limit, now)
        self._pack(departure, int(min(limit, verdict.most)), now)
        arrived = list(map(_ARRIVED, departure.members))
        self._wait += (now - min(arrived) - self._wait) * WAIT_WEIGHT
        if (past := self._past) is not None:
            past.left(arrived, now)
        self.last_departure = now
        self._schedule = max(self._schedule, now) + self._rule.pace
        self._budgets.earn((member.entry.tenant for member in departure.members), now)
        if choice.turn is not None:
            full = self.service.seconds(self.limits.max_batch)
            self._suspects.earn(self.service.seconds(self._size(departure.members)), tenants, full)
        if self.bulk is not None:
            self._fill(self.bulk, departure, limit, now)
        return self._leave(departure, now)

    def _depart_whole(self, bulk: BulkClass, worker: str, limit: int, until: float, now: float) -> Departure | Hold:
        """Return a batch of only bulk entries that leaves now, or a Hold. Regular entries don't leave before `until`."""
        forecast = self._forecast(limit, now)
        opens = bulk.opens_at(forecast, now)
        if opens > now:
            return Hold(min(until, opens))
        padding = self.limits.padding
        near, padded = (None, 0.0) if padding is None else (self._nearness(limit), limit * padding.longest)
        members = bulk.whole(limit, limit * self.limits.unit, forecast, now, near, padded)
        departure = Departure(worker, members, BULK, now, bulk=len(members))
        return self._leave(departure, now)

    def _forecast(self, limit: int, now: float) -> Forecast:
        """Return the forecast for a whole batch that leaves now. Its run time follows the line, even far beyond known sizes."""
        seconds, rate = (
            self.service.alpha + self.service.beta * limit,
            sum(arrivals.at(now) for arrivals in self._rates),
        )
        gap = self._rule.gap(self._running.largest)
        return Forecast(seconds, rate, gap, self.slots, self.whole_slots, self._newest, self._fresh)

    def _fill(self, bulk: BulkClass, departure: Departure, limit: int, now: float) -> None:
        """Fill the empty seats of a batch with bulk entries, as far as `core.bulk.seats` allows."""
        members, limits = departure.members, self.limits
        bulk.earn(len(members))
        if not members or members[0].entry.shape or not bulk.depth or departure.parted:
            return
        size, waited = self._size(members), now - min(map(_ARRIVED, members))
        weights = list(map(_WEIGHT, members))
        heaviest = max(weights)
        alpha, beta = limits.line_at(self.service.alpha, self.service.beta, heaviest)
        most = limit if limits.padding is None else min(limit, limit * limits.padding.longest / heaviest)
        room = seats(alpha, beta, size, most, waited, limits.promise)
        count = int(min(room, limit)) - len(members)
        left = room * limits.unit - sum(weights)
        if limits.padding is None:
            riders = bulk.fill(count, left)
        else:
            alpha, beta = limits.line_at(self.service.alpha, self.service.beta, 1.0)
            near = self._nearness(limit)
            padded = seats(alpha, beta, size * heaviest, limit * limits.padding.longest, waited, limits.promise)
            # If only heavier bulk entries are waiting, take some of them; otherwise they would block those behind them.
            riders = bulk.fill_near(count, left, len(members), heaviest, near) or bulk.fill_near(
                count, left, len(members), heaviest, near, padded
            )
        departure.members, departure.bulk = members + riders, len(riders)

    def _charge_delay(self, bulk: BulkClass, worker: str, limit: int, now: float) -> None:
        """Charge the bulk class for the entries that leave now if they had to wait for a GPU that ran a whole batch of bulk
        entries."""
        if bulk.near(now) and self._running.busy >= self.slots - 1:
            before, view = now - 2 * LEEWAY, self._view(worker)
            if view.oldest <= before and not isinstance(decide(self._rule, view, before), Hold):
                bulk.charge(min(self._fresh, limit), now)

    def _price(self, group: Group, now: float) -> float:
        """Return the price of a GPU second for a group. It is higher if the group's caller runs apart; see `core.suspects`."""
        apart = self.culprits.active and self.culprits.rides_apart(caller_of(group.members[0].entry), now)
        return APART_PRICE if apart else 1.0

    def _depart_apart(self, worker: str, group: Group, limit: int, now: float, price: float = 0.0) -> Departure:
        weight = limit * self.limits.unit
        if group.caller is not None:
            others = self._fresh or now - self._newest < MIXED_SECONDS or self._suspects.beside(group.caller)
            limit = min(limit, self._group_size(group.caller, MOST_OUTPUT if others else LONE_ROOM))
        members = self._suspects.take(group, limit, weight)
        for member in members:
            member.state, member.attempts = RUNNING, group.attempts + 1
        if group.kind != FIRST:
            full = self.service.seconds(self.limits.max_batch)
            self._suspects.pay(group, self.service.seconds(self._size(members)), full, price)
        reason = APART if group.attempts == 0 and group.kind == QUARANTINE else RETRY
        departure = Departure(worker, members, reason, now)
        departure.failures, departure.attempts = group.failures, group.attempts + 1
        departure.alone, departure.rest, departure.quarantine = group.alone, group.rest, group.caller
        return self._leave(departure, now)

    def wake(self, idle: Collection[str], now: float) -> str | float:
        """Return one of the idle workers that has something to claim now, or the time to look again. Uses the last claim's rule while
        it is fresh, so it may be called after every enqueue. If the rule distinguishes slots, the fastest worker is woken first."""
        self._take_in()
        again = math.inf
        if self._suspects.groups:
            woken = self._suspects.wake(idle, self.slots > 1, now)
            if isinstance(woken, str):
                return woken
            again = woken
        if self._fresh == 0:
            return again if self.bulk is None else self._wake_for_bulk(self.bulk, idle, again, now)
        if self._policy is None:
            return next(iter(idle))
        rule = self._rule if now - self._rule_at <= RULE_AGE else self._new_rule(self._policy, now)
        first = min(idle, key=self.factors.of) if rule.team else next(iter(idle))
        verdict = decide(rule, self._view(first), now)
        if not isinstance(verdict, Hold):
            return first
        again = min(again, verdict.until)
        return again if self.bulk is None else self._wake_for_bulk(self.bulk, idle, again, now)

    def _wake_for_bulk(self, bulk: BulkClass, idle: Collection[str], until: float, now: float) -> str | float:
        """Return an idle worker that may run a whole batch of bulk entries now, or the time to look again. Regular entries
        don't leave before `until`."""
        if not bulk.depth:
            return until
        opens = bulk.opens_at(self._forecast(self._limit, now), now)
        return next(iter(idle)) if opens <= now else min(until, opens)

    def bulk_held(self, now: float) -> float:
        """Return the seconds until bulk entries may use an idle GPU if no regular ones arrive; see `core.bulk.BulkClass.held`."""
        return 0.0 if self.bulk is None else self.bulk.held(self._forecast(self._limit, now), now)

    def expire(self, now: float) -> list[QueuedEntry]:
        self._take_in()
        late = list(self._due.overdue(now))
        late += self._suspects.overdue(now)
        for queued in late:
            self.remove(queued)
        return late

    def next_due(self) -> float:
        """Return the time at which `expire` next has something to do; infinite if nothing waits."""
        self._take_in()
        return min(self._due.earliest(), self._suspects.due)

    def remove(self, queued: QueuedEntry) -> None:
        """Forget an entry. If it is running, it stays in its batch, but isn't tried again."""
        self._take_in()
        if queued.entry.tier >= self.limits.tiers:
            if queued.state == QUEUED and self.bulk is not None:
                self.bulk.drop(queued)
        elif queued.state == RETRYING:
            self._suspects.remove(queued, self._group_size)
        elif queued.state == QUEUED:
            self._tier_queues[queued.entry.tier].drop(queued)
            self._due.tidy()
            self._fresh -= 1
            if self._waiting is not None:
                self._discount([queued], self._waiting)
        queued.state = GONE

    def finish(self, departure: Departure, now: float, *, learns: bool = True) -> list[QueuedEntry]:
        """End a batch that came back with outputs. If `learns`, learn from its run time. Returns the members that are still wanted."""
        past = self._past
        if past is not None:
            self._take_in()
            past.ended(self._fresh, self._running, self._newest, now)
        wanted = self._arrive(departure, now, GONE)
        seconds = now - departure.left_at
        if departure.quarantine is not None and self.culprits.sends_large(departure.quarantine, now):
            if self._fresh:
                self._suspects.overrun(seconds - self.service.seconds(departure.size))
        elif learns and not (departure.bulk and departure.whole and departure.members[0].entry.shape):
            # Entries that run apart aren't typical, so nothing is learnt from them.
            doubt = PADDED_DOUBT if self.limits.padding is not None else 1.0
            if departure.parted:  # It had only light or only heavy entries, which says nothing about the slot.
                self.service.observe(departure.size, seconds / self.factors.of(departure.worker))
            else:
                self.factors.learn(self.service, departure.worker, departure.size, seconds, self._departures, doubt)
        self._rejudge()
        if departure.rest is not None and (rest := self._suspects.let_go(departure.rest)):
            self._suspects.halve(rest, Group([], now, QUARANTINE, departure.failures, departure.attempts - 1))
        if departure.quarantine is not None:
            self.culprits.ran(departure.quarantine, len(departure.members), clean=True)
        return wanted

    def leave_out(self, departure: Departure, members: Sequence[tuple[QueuedEntry, int]], now: float) -> None:
        """Run members again in their callers' quarantines, because their outputs were left out of the batch's answer. Each
        member comes with its output's size."""
        callers = {caller_of(member.entry) for member, _ in members}
        if new_callers := {caller for caller in callers if not self.culprits.rides_apart(caller, now)}:
            self._move_apart(new_callers, now)
        for member, size in members:
            caller = caller_of(member.entry)
            self.culprits.left_out(caller, size, now)
            like = Group([], now, QUARANTINE, departure.failures, departure.attempts)
            self._suspects.join(caller, [member], like, self._group_size(caller))
        self._rejudge()

    def _move_apart(self, callers: Set[CallerKey], now: float) -> None:
        """Move the next waiting entries of some callers to their quarantines, as if they had just arrived."""
        self._take_in()
        like = Group([], now, QUARANTINE)
        for tier_queue in self._tier_queues:
            waiting = islice(tier_queue.in_turn(), NEAR_BATCHES * self.limits.max_batch)
            for queued in [queued for queued in waiting if caller_of(queued.entry) in callers]:
                self.remove(queued)
                self._suspects.join(caller_of(queued.entry), [queued], like, self.limits.max_batch)

    def hand_back(self, departure: Departure, now: float) -> None:
        """Take back a batch that never ran. Its entries wait again, at no cost, ahead of all others."""
        members = self._arrive(departure, now, RETRYING)
        if departure.bulk and self.bulk is not None:
            riders, members = self._parted(members)
            self.bulk.hand_back(riders)
        before = Group(members, now, FIRST, departure.failures, departure.attempts - 1, departure.alone)
        if members:
            before.rest = departure.rest
            self._suspects.add(before)
        else:
            self._suspects.unknown(self._suspects.let_go(departure.rest), before, self._group_size)

    def fail(
        self, departure: Departure, cause: Cause, now: float, rng: Rng, error: str = "", places: Collection[int] = ()
    ) -> FailureOutcome:
        """End a failed batch; see `core.retry`. `error` is for clients. If the batch was split into calls, `places` are the
        positions of the entries in the call that raised an exception. The other entries run again, unsuspected."""
        self._sure_until = -math.inf  # Its callers may run apart from now on.
        after, members = FailureOutcome(), list[QueuedEntry]()
        arrived = self._arrive(departure, now, RETRYING)
        if departure.bulk:
            after.bulk, arrived = self._parted(arrived)
        for member in arrived:
            (members if member.due > now else after.late).append(member)
        if departure.bulk:  # Regular members aren't suspected until they fail without bulk entries.
            return self._fail_beside(departure, members, after, now)
        failures, attempts = departure.failures + 1, departure.attempts
        alone = departure.alone + (len(departure.members) == 1 or len(places) == 1)
        if places:
            members = self._suspected(departure, members, places, after, now)
        if departure.quarantine is not None and cause in SEARCHED:
            self.culprits.ran(departure.quarantine, len(departure.members), clean=False)
        if members and is_over(cause, len(members), attempts, alone):
            after.dead, members = members, []
            if cause in BLAMED:
                # Its caller's waiting entries stay. No failed batch mixes callers again, so each costs others one run.
                self.culprits.found(after.dead[0].entry, now, cause not in SEARCHED, error, departure.left_at)
        elif cause not in SEARCHED:
            members = self._paid(members, after.spent, now)
        after.again += len(members)
        hung = cause is Cause.TIMEOUT
        self._run_again(members, cause, Group([], now, FIRST, failures, attempts, alone, hung=hung), departure, rng)
        for member in (*after.dead, *after.spent, *after.late):
            member.state, member.hung = GONE, hung
        return after

    def _suspected(
        self,
        departure: Departure,
        members: list[QueuedEntry],
        places: Collection[int],
        after: FailureOutcome,
        now: float,
    ) -> list[QueuedEntry]:
        """Return the members at `places` in their batch. The other members run again as if they hadn't run."""
        there = {id(departure.members[place]) for place in places}
        if others := [member for member in members if id(member) not in there]:
            self._suspects.add(Group(others, now, FIRST, departure.failures, departure.attempts - 1))
            after.again += len(others)
        return [member for member in members if id(member) in there]

    def _fail_beside(
        self, departure: Departure, members: list[QueuedEntry], after: FailureOutcome, now: float
    ) -> FailureOutcome:
        """Handle the failure of a batch with bulk entries. These end, and `members` run again as if for the first time."""
        if members:
            self._suspects.add(Group(members, now, FIRST, departure.failures, departure.attempts - 1))
        after.again = len(members)
        for member in (*after.bulk, *after.late):
            member.state = GONE
        return after

    def _parted(self, members: Sequence[QueuedEntry]) -> tuple[list[QueuedEntry], list[QueuedEntry]]:
        parts: tuple[list[QueuedEntry], list[QueuedEntry]] = [], []
        for member in members:
            parts[member.entry.tier < self.limits.tiers].append(member)
        return parts

    def _paid(self, members: list[QueuedEntry], spent: list[QueuedEntry], now: float) -> list[QueuedEntry]:
        """Return the members whose tenants can pay for a retry, and add the others to `spent`."""
        counts = Counter(member.entry.tenant for member in members)
        paid = {tenant for tenant, count in counts.items() if self._budgets.spend(tenant, count, now)}
        spent += [member for member in members if member.entry.tenant not in paid]
        return [member for member in members if member.entry.tenant in paid]

    def _run_again(
        self, members: list[QueuedEntry], cause: Cause, group: Group, departure: Departure, rng: Rng
    ) -> None:
        """Run failed members again. To search for a culprit, they run immediately, in halves. Otherwise, they run as a whole,
        later and on another worker."""
        whole = bool(members) and stays_whole(cause, len(members), group.failures)
        if members and (whole or cause not in SEARCHED or len(members) == 1):
            group.ready_at += backoff(group.failures, rng())
            elsewhere = max(self.service.seconds(len(members)), MIN_AVOIDANCE)
            group.avoid, group.avoid_until = departure.worker, group.ready_at + elsewhere
        if whole and departure.rest is not None and cause in NEVER_SPLIT:
            group.rest = departure.rest
        else:
            rest = self._suspects.let_go(departure.rest)
            before = Group([], departure.left_at, QUARANTINE, departure.failures, departure.attempts - 1)
            self._suspects.unknown(rest, before, self._group_size)
        if whole:
            group.members = members
            self._suspects.add(group)
        elif members:
            self._suspects.halve(members, group)

    def _new_rule(self, policy: Policy, now: float) -> Rule:
        self._rule, self._rule_at = policy.rule(self.load(now, self._past)), now
        return self._rule

    def _arrive(self, departure: Departure, now: float, state: int) -> list[QueuedEntry]:
        """End a run. Sets the state of the members that are still wanted, and returns them."""
        self._running.back(departure.size, self.slots, now)
        if departure.bulk and departure.whole and self.bulk is not None:
            self.bulk.back(now)
        wanted = departure.members
        if list(map(_STATE, wanted)).count(RUNNING) < len(wanted):
            wanted = [member for member in wanted if member.state == RUNNING]
        for member in wanted:
            member.state = state
        return wanted

    def _leave(self, departure: Departure, now: float) -> Departure:
        self._departures += 1
        self._rejudge()
        departure.size = self._size(departure.members)
        self._running.left(departure.size, self.slots, now)
        return departure

    def _view(self, worker: str) -> QueueSnapshot:
        oldest = math.inf
        for tier_queue in self._tier_queues:
            if tier_queue.depth and (first := tier_queue.oldest()) is not None and first.arrived < oldest:
                oldest = first.arrived
        depth = self._size_of(self._tier_queues) if self._weighs else self._fresh
        due, running = self._due.earliest(), self._running
        factor, unseen = self.factors.standing(worker, self._departures) if self._rule.team else (1.0, 0)
        newest = self._newest
        if self._rule.company and self._past is not None:
            newest = max(newest, self._past.last_end)
        return QueueSnapshot(
            depth, oldest, due, self.last_departure, self._schedule, newest, running.largest, factor, unseen,
            busy=running.busy, slots=self.slots,
        )  # fmt: skip

    def _gate_now(self, now: float) -> admission.AdmissionLimits:
        if now - self._gate_at > GATE_AGE:
            limits, service = self.limits, self.service
            self._gate = admission.AdmissionLimits.of(
                limits.max_batch,
                self.whole_slots,
                service.seconds(limits.max_batch),
                service.deviation,
                self._sizes([arrivals.after_rest(now) for arrivals in self._rates]),
                limits.reserved_share,
            )
            self._gate_at = now
        return self._gate

    def _nearness(self, limit: int) -> Nearness:
        """Return the terms for batching entries of similar weight. Every second batch starts with a lower tier's turn."""
        limits, by_age = self.limits, self._departures % 2 == 1 and self.limits.reserved_share > 0.0
        fixed = limits.padding.fixed * limits.max_batch if limits.padding is not None else 0.0
        return Nearness(self._limit, fixed, NEAR_BATCHES * limit, limits.padded_cost, by_age)

    def _pack(self, departure: Departure, limit: int, now: float) -> None:
        """Fill the batch. While several tenants are waiting, it gets only a few large entries, because large entries delay all
        the others in the batch."""
        limits, hopeless = self.limits, now + self.service.seconds(limit)
        terms = Terms(
            limit, limit * limits.unit, limits.unit, limits.reserved_share, self._owed,
            BATCH_PAGES if now - self._mixed_at < MIXED_SECONDS else math.inf,
            limits.rows, limits.rows and self._departures % 2 == 1, hopeless,
        )  # fmt: skip
        if limits.padding is None:
            packed = pack(self._tier_queues, terms)
        else:
            packed = pack_nearest(self._tier_queues, terms, self._nearness(limit))
        departure.members, departure.late, self._owed = packed.members, packed.late, packed.owed
        departure.parted = packed.parted
        self._fresh -= len(packed.members) + len(packed.late)
        if self._waiting is not None:
            self._discount([*packed.members, *packed.late], self._waiting)
        self._due.tidy()
        for tier_queue in self._tier_queues:
            tier_queue.tidy()


def _past_of(limits: QueueLimits) -> Past | None:
    """Return a new record of arrivals. None if entries have weights other than rows, because sizes aren't numbers of entries
    then."""
    return Past() if not limits.max_weight or limits.unit == 1.0 else None
