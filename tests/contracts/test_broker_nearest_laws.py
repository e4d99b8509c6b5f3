"""The laws for models that pad and have per-call parameters: who shares a batch, whose turn it is, and who pays."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from headway.core.departure import APART, BULK, RETRY
from headway.core.packing import ALIKE
from headway.core.queue_limits import QueueLimits
from headway.model import Cause, CostLine, CostShape, Entry, EntryState, Lease, Submission, ValueKind
from tests.contracts.broker_model import Waiting, key
from tests.contracts.brokers import HARNESSES, LIMITS, MAX_BATCH, QUEUES, Harness, ask, beat
from tests.contracts.test_broker_laws import EXPLORE_ALIKE, GATEWAYS, TENANTS, WORKERS, BulkLaws
from tests.servers.redis import SharedServers

LINES = (CostLine(CostShape.PADDED, 0.01, 0.001, 10.0), CostLine(CostShape.PADDED, 0.05, 0.001, 25.0))
KEYS = 3
"""Number of different per-call parameters."""
WINDOW = 8
"""Batches of a tier in which the nearest are searched."""
TOLD_SECONDS = 0.5
"""Seconds for which a worker's report counts as known everywhere."""
CONTENDED = 20
"""Batches of a contention."""
EXPLORE_FEW = settings(EXPLORE_ALIKE, max_examples=2)
EXPLORE_MANY = settings(EXPLORE_ALIKE, max_examples=20)
EXPLORED = {"memory": EXPLORE_MANY, "near": EXPLORE_MANY}
PARTS = 2
"""Tests on one server, as a contention takes some hundred round trips. Each starts with the smallest case."""
FAIR_WAIT = 3
"""Batches that everyone then waits for under first come, first served."""
LEAST_SHARE = 0.3
"""Smallest share of one of two tenants that want more than they get."""


class NearestLaws(BulkLaws):
    """Both models take parameters that apply to a whole call, and pad at times. If a padding model's batches are
    limited by number only, the first entry of each has its turn, no heavier one rides while one that is alike or
    lighter is left, and within a tier the nearest ride. An entry's turn comes before those of what its tenant sends
    later, unless one of these leaves without a run or rides past another key for free."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers_of_keys = itertools.count()
        self.line: CostLine | None = None
        self.overtaken = set[Submission]()
        """Entries whose tenant has got a turn back since they came."""
        self.told_at = -TOLD_SECONDS
        self.tell()

    def tell(self) -> None:
        """Have a worker of each model report what it takes, and let all processes hear it."""
        self.told_at = self.harness.now()
        self.bounds: Mapping[str, QueueLimits] = {
            model: limits.filling_up(self.line).counting_rows() for model, limits in QUEUES.items()
        }
        for model in QUEUES:
            takes, gives = ValueKind.TEXT.value, ValueKind.TEXT.value
            told = beat(
                self.broker, f"of {model}", model=model, takes=takes, gives=gives, per_call=("t",), cost=self.line
            )
            self.do(told)
        for broker in (self.broker, self.harness.peer()):
            self.do(broker.workers())
        self.culprits.workers_changed()

    def ask(self, *what: Any, weight: int = 1, shape: int | None = None, **how: Any) -> Entry:
        """Make an entry of any key. As in gateways, it has a length only while the model pads."""
        key = next(self.numbers_of_keys) % KEYS if shape is None else shape
        return ask(*what, weight=weight if self.line is not None else 1, shape=key, **how)

    @rule(line=st.sampled_from((None, *LINES)))
    def learn_what_calls_cost(self, line: CostLine | None) -> None:
        self.pad(line)

    def pad(self, line: CostLine | None) -> None:
        self.line = line
        self.overtaken |= self.let_in.keys()
        self.tell()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), places=st.sets(st.integers(0, MAX_BATCH - 1), min_size=1))
    def fail_in_one_call(self, data: st.DataObject, places: set[int]) -> None:
        """One of a batch's calls raises: its inputs become suspects, and the others run again free of charge."""
        held = self.pick(data)
        there = sorted(place for place in places if place < len(held.lease.entries))
        self.end_in_failure(held, Cause.RAISED, there if len(there) < len(held.lease.entries) else ())

    @rule(places=st.sets(st.integers(0, MAX_BATCH - 1), min_size=1, max_size=MAX_BATCH - 1), tier=st.integers(0, 2))
    def search_one_call(self, places: set[int], tier: int) -> None:
        """In a batch of several callers one call raises, and then again one in what is left of it."""
        entries = [
            self.ask(id=f"id-{next(self.numbers)}", tenant=TENANTS[n % 2], caller=f"{n}", tier=tier, gateway=GATEWAYS[0], shape=0, weight=1 + n)
            for n in range(MAX_BATCH)
        ]  # fmt: skip
        for entry, verdict in zip(entries, self.do(self.broker.enqueue(entries)), strict=True):
            self.note(entry, verdict)
        suspects = set[Submission]()
        for _ in range(MAX_BATCH):
            before = len(self.leases)
            self.claim(WORKERS[0], "m", MAX_BATCH, patient=False)
            if len(self.leases) == before:
                return
            held = self.leases.pop()
            riders = list(map(key, held.lease.entries))
            if not suspects and len(riders) > max(places):
                suspects = {riders[place] for place in places}
                self.end_in_failure(held, Cause.RAISED, sorted(places) if len(places) < len(riders) else ())
            elif suspects & set(riders):
                self.end_in_failure(held, Cause.RAISED)
            else:
                self.answer(held)
                self.settle(held, valid=True)

    def claim(self, worker: str, model: str, limit: int, patient: bool) -> None:
        if self.harness.now() - self.told_at >= TOLD_SECONDS:
            self.tell()
        before = {one: known for one, known in self.let_in.items() if self.is_fresh(one, known, model)}
        held = len(self.leases)
        super().claim(worker, model, limit, patient)
        if len(self.leases) > held:
            lease = self.leases[-1].lease
            first = key(lease.entries[0]) in before
            riders = [known for rider in lease.entries if (known := before.pop(key(rider), None)) is not None]
            if self.line is not None and first and lease.reason not in (RETRY, APART, BULK):
                self.judge(riders, before, limit, model)

    def is_fresh(self, submission: Submission, known: Waiting, model: str) -> bool:
        """Whether an entry that hasn't run may wait for its turn in a queue."""
        entry = known.entry
        if str(entry.queue) != model or entry.tier >= LIMITS.tiers or known.claims or known.failed_with:
            return False
        callers = {(self.let_in[one].entry.tenant, self.let_in[one].entry.caller) for one in self.failed}
        return submission not in self.outcomes and not known.cancelled and (entry.tenant, entry.caller) not in callers

    def waits(self, submission: Submission) -> bool:
        return self.do(self.broker.state(*submission[:2])) is EntryState.QUEUED

    def judge(self, riders: Sequence[Waiting], left: Mapping[Submission, Waiting], limit: int, model: str) -> None:
        first = riders[0]
        self.has_its_turn(first, left)
        if self.bounds[model.partition("@")[0]].max_weight == 0:
            self.is_of_its_tier(first, riders, left, limit)
            alike = {one: known for one, known in left.items() if known.entry.shape == first.entry.shape}
            tiers = Counter(known.entry.tier for known in (*riders, *left.values()))
            if max(tiers.values()) <= WINDOW * limit:
                self.rides_with_its_nearest(riders, alike, self.bounds[model.partition("@")[0]], limit)
        mixed = any(
            known.entry.shape != first.entry.shape
            for one, known in self.let_in.items()
            if str(known.entry.queue) == model and one not in self.outcomes and not known.cancelled
        )
        if mixed:  # Riding past another key is free, so the tenant's next entry may come earlier.
            self.overtaken |= left.keys()

    def has_its_turn(self, first: Waiting, left: Mapping[Submission, Waiting]) -> None:
        """Nobody starves: the first entry of a batch came before all others of its tenant and tier."""
        order = {one: place for place, one in enumerate(self.let_in)}
        line = first.entry.tenant, first.entry.tier, first.entry.queue
        lost = [
            known
            for one, known in self.let_in.items()
            if (known.entry.tenant, known.entry.tier, known.entry.queue) == line and not known.claims
            and (known.cancelled or one in self.outcomes or not self.is_in_time(known))
        ]  # fmt: skip
        if lost:
            return
        for one, known in left.items():
            if (known.entry.tenant, known.entry.tier, known.entry.queue) == line and one not in self.overtaken:
                assert order[key(first.entry)] < order[one] or not self.waits(one), "overtaken by its own tenant's"

    def is_in_time(self, known: Waiting) -> bool:
        return self.harness.now() < known.since + min(known.entry.queue_timeout, known.entry.timeout)

    def is_of_its_tier(
        self, first: Waiting, riders: Sequence[Waiting], left: Mapping[Submission, Waiting], limit: int
    ) -> None:
        """The tier is the highest, or the longest-waiting one if first come, first served would give it a place."""
        tier = first.entry.tier
        above = [one for one, known in left.items() if known.entry.tier < tier and self.waits(one)]
        if above:
            riding = sum(known.entry.tier < tier for known in riders)
            assert len(above) + riding < limit, "a lower tier goes first"
            oldest = min(known.since for known in (*riders, *left.values()) if known.entry.tier == tier)
            assert all(oldest <= left[one].since + 1e-3 for one in above), "a lower tier goes first"

    def rides_with_its_nearest(
        self, riders: Sequence[Waiting], alike: Mapping[Submission, Waiting], bounds: QueueLimits, limit: int
    ) -> None:
        """Entries that are alike or lighter ride before heavier ones, and within a tier the nearest to the first do."""
        weight, padding = riders[0].entry.weight, bounds.padding
        assert padding is not None
        step = ALIKE * (padding.fixed * bounds.max_batch / min(limit, bounds.max_batch) + weight)

        def far(known: Waiting) -> tuple[bool, int]:
            distance = int(abs(known.entry.weight - weight) / step)
            return known.entry.weight > weight and distance > 0, distance

        for rider in riders[1:]:
            heavier, distance = far(rider)
            nearer = [
                one
                for one, known in alike.items()
                if (heavier and not far(known)[0])
                or (known.entry.tier == rider.entry.tier and far(known)[0] == heavier and far(known)[1] < distance)
            ]
            assert not any(map(self.waits, nearer)), "a nearer one is left"

    @rule()
    def take_turns_between_tiers(self) -> None:
        """Of two batches, one starts with the highest tier and one with the tier that has waited longest."""
        self.pad(LINES[0])
        if not self.empty("m"):
            return
        firsts = []
        for tier, count in ((2, 4 * MAX_BATCH), (0, 1), (0, 1)):
            how: dict[str, Any] = {"caller": f"calm {next(self.numbers)}", "tier": tier, "shape": 0}
            how |= {"tenant": TENANTS[0], "gateway": GATEWAYS[0]}
            entries = [self.ask(id=f"id-{next(self.numbers)}", **how) for _ in range(count)]
            verdicts = self.do(self.broker.enqueue(entries))
            for entry, verdict in zip(entries, verdicts, strict=True):
                self.note(entry, verdict)
            if any(verdicts):
                return
            if tier == 2:
                self.do(self.harness.advance(0.002))
            elif (lease := self.run_next()) is None or not lease.entries[0].caller.startswith("calm"):
                return
            else:
                firsts.append(lease.entries[0].tier)
        assert sorted(firsts) == [0, 2]

    @rule(
        weights=st.permutations([1, 5, 20]),
        tier=st.integers(0, 2),
        keys=st.booleans(),
        few=st.integers(MAX_BATCH // 2, MAX_BATCH),
    )
    def contend(self, weights: list[int], tier: int, keys: bool, few: int) -> None:
        """Passing costs: of two tenants, one keeps few entries waiting, one many, and each gets its share by cost."""
        self.pad(LINES[0])
        if not self.empty("m"):
            return
        spent, waiting = dict.fromkeys(TENANTS, 0.0), {tenant: dict[Submission, int]() for tenant in TENANTS}
        cost, waited = self.bounds["m"].padded_cost, dict.fromkeys(TENANTS, 0)
        caller = f"calm {next(self.numbers)}"
        for number in range(CONTENDED):
            for tenant, weight, most in zip(TENANTS, weights, (few, 2 * MAX_BATCH), strict=False):
                how: dict[str, Any] = {"tenant": tenant, "caller": caller, "tier": tier, "weight": weight}
                how |= {"gateway": GATEWAYS[0], "shape": keys * TENANTS.index(tenant)}
                missing = range(most - len(waiting[tenant]))
                entries = [self.ask(id=f"id-{next(self.numbers)}", **how) for _ in missing]
                verdicts = self.do(self.broker.enqueue(entries))
                for entry, verdict in zip(entries, verdicts, strict=True):
                    self.note(entry, verdict)
                if any(verdicts):
                    return  # One of them isn't waiting now.
                waiting[tenant] |= {key(entry): number for entry in entries}
            lease = self.run_next()
            if lease is None:
                return
            for rider in lease.entries:
                if (came := waiting[rider.tenant].pop(key(rider), None)) is not None:
                    spent[rider.tenant] += cost(max(rider.weight, lease.entries[0].weight))
                    waited[rider.tenant] = max(waited[rider.tenant], number - came)
        for tenant, known in waiting.items():
            waited[tenant] = max([waited[tenant], *(CONTENDED - came for came in known.values())])
            assert keys or waited[tenant] <= FAIR_WAIT or spent[tenant] >= LEAST_SHARE * sum(spent.values()), tenant
        dear, cheap = max(weights[:2]), min(weights[:2])
        assert max(waited.values()) <= (2 + cost(dear) / cost(cheap)) * FAIR_WAIT

    def run_next(self) -> Lease | None:
        before = len(self.leases)
        self.claim(WORKERS[0], "m", MAX_BATCH, patient=False)
        if len(self.leases) == before:
            return None
        held = self.leases.pop()
        self.answer(held)
        self.settle(held, valid=True)
        return held.lease

    def empty(self, model: str) -> bool:
        """Run what waits for a model. Returns whether nothing is left."""
        for _ in range(30):
            if not self.run_one(model):
                break
        return not any(depth.depth for depth in self.do(self.broker.depths()) if str(depth.queue) == model)


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind in HARNESSES for part in range(1 if kind in EXPLORED else PARTS)]
)
def test_the_laws_hold_of_models_that_pad(kind: str, part: int, servers: SharedServers) -> None:
    made: Callable[[], Harness] = staticmethod(lambda: HARNESSES[kind](servers))
    laws = type("Laws", (NearestLaws,), {"made": made})
    if part and settings().derandomize:
        laws = seed(part)(laws)
    run_state_machine_as_test(laws, settings=EXPLORED.get(kind, EXPLORE_FEW))
