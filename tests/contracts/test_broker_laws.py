"""The laws of every broker, under random interleavings: tenants send one or several inputs, for all tiers, models and
gateways. Slots claim, answer, fail, give back, extend or go silent; clients leave; time passes; some inputs fail
whenever they run, and are sent again. `tests.contracts.broker_model` knows what is allowed. At the end everything is
drained: each admitted entry has had one outcome."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headway import errors
from headway.core.bulk import BATCHES_WAITING, QUIET
from headway.core.ratelimit import counting_as
from headway.core.retry import BLAMED
from headway.core.suspects import KNOWN_SECONDS
from headway.model import (
    MOST_OUTPUT,
    Cause,
    Entry,
    EntryState,
    Failure,
    ItemResult,
    Limit,
    NoWork,
    Reply,
    Submission,
    TierDepth,
    ValueKind,
    WorkerStatus,
)
from headway.ports import Broker
from tests.contracts.broker_model import LIMIT_BURST, LIMIT_RATE, MODEL_BURST, MODEL_RATE, BrokerModel, Held, key
from tests.contracts.brokers import (
    AT_ONCE,
    HARNESSES,
    LIMITS,
    MAX_BATCH,
    MAX_WEIGHT,
    MOST_ATTEMPTS,
    NAMED_QUEUES,
    QUEUES,
    TRACE,
    WHEN_FULL,
    Harness,
    MemoryHarness,
    ask,
    beat,
    failed,
    output,
    slot,
    tensors,
)
from tests.servers.redis import SharedServers

T = TypeVar("T")

LARGE_OUTPUT = MOST_OUTPUT // 3
"""Bytes of an output; three fit into a batch."""

GATEWAYS = ("g1", "g2")
WORKERS = ("gpu-0", "gpu-1", "gpu-2")
LAST = "last"
"""The worker that runs what is left at the end."""
TENANTS, CALLERS, TEXTS = "ab", ("ann", "bob", ""), ("poison", "venom")
"""Tenants, callers, and inputs that several callers send; a replay has no caller."""
WHO = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(TENANTS),
        "caller": st.sampled_from(CALLERS),
        "model": st.sampled_from(NAMED_QUEUES),
        "gateway": st.sampled_from(GATEWAYS),
    }
)
HOW = st.fixed_dictionaries(
    {
        "tier": st.integers(0, 2),
        "queue_timeout": st.sampled_from([0.05, 3.0, 60.0]),
        "timeout": st.sampled_from([0.2, 20.0, 100.0]),
        "weight": st.sampled_from([1, 5, 20, MAX_WEIGHT + 1]),
        "trace": st.sampled_from([b"", TRACE]),
    }
)
EXPLORE = settings(max_examples=40, stateful_step_count=50)
EXPLORE_SERVER = settings(EXPLORE, max_examples=10)
"""Each step is a round trip. Now and then all entries are looked at, with a round trip each."""
EXPLORED = {"memory": EXPLORE, "near": EXPLORE, "valkey": EXPLORE_SERVER}
EXPLORE_ALIKE = settings(EXPLORE, max_examples=6)
"""For tests that differ little from the others."""


class BrokerLaws(BrokerModel, RuleBasedStateMachine):
    made: Callable[[], Harness]

    def __init__(self) -> None:
        BrokerModel.__init__(self)
        RuleBasedStateMachine.__init__(self)
        self.harness = self.made()
        self.broker = self.harness.broker
        self.cursors = dict.fromkeys(GATEWAYS, 0)
        self.numbers, self.steps = itertools.count(), itertools.count()
        self.look_every = 1 if isinstance(self.harness, MemoryHarness) else 12

    def door(self, peer: bool) -> Broker:
        return self.harness.peer() if peer else self.broker

    def offer(self, entries: Sequence[Entry], peer: bool = False) -> Iterable[tuple[Entry, Failure | None]]:
        """Offer entries of any gateways. Returns each with its verdict."""
        door = self.door(peer)
        parts = (
            [one for one in entries if one.tier < LIMITS.tiers],
            [one for one in entries if one.tier >= LIMITS.tiers],
        )
        for some, call in zip(parts, (door.enqueue, door.enqueue_bulk), strict=True):
            if some:
                yield from zip(some, self.do(call(some)), strict=True)

    def ask(self, *what: Any, **how: Any) -> Entry:
        return ask(*what, **how)

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        return self.harness.run(act)

    @rule(healthy=st.sets(st.sampled_from(WORKERS)))
    def beat(self, healthy: set[str]) -> None:
        for worker in sorted(healthy):
            self.do(beat(self.broker, worker))
        self.culprits.workers_changed()

    @rule(who=WHO, how=HOW, count=st.integers(1, 10))
    def enqueue(self, who: dict[str, str], how: dict[str, Any], count: int) -> None:
        entries = [self.ask(id=f"id-{next(self.numbers)}", **who, **how) for _ in range(count)]
        for entry, verdict in zip(entries, self.do(self.broker.enqueue(entries)), strict=True):
            self.note(entry, verdict)

    @rule(asked=st.lists(st.tuples(st.sampled_from(TEXTS), WHO), min_size=1, max_size=3), peer=st.booleans())
    def ask_the_same(self, asked: list[tuple[str, dict[str, str]]], peer: bool) -> None:
        """Send an input again that failed alone. While it is known, it is answered without a run, as `note` checks."""
        entries = [self.ask(text, id=f"id-{next(self.numbers)}", **who) for text, who in asked]
        for entry, verdict in self.offer(entries, peer):
            self.note(entry, verdict)

    @rule(
        who=WHO,
        texts=st.lists(st.sampled_from((*TEXTS, "", "")), min_size=1, max_size=int(MODEL_BURST) - 1),
        peer=st.booleans(),
    )
    def ask_several(self, who: dict[str, str], texts: list[str], peer: bool) -> None:
        """Send several inputs. The first pays for all, from its user's limit and the one for the model. If one is
        refused, all are withdrawn."""
        tenant, model = who["tenant"], who["model"]
        of_all = Limit(f"user:{tenant}", "user", LIMIT_RATE, LIMIT_BURST)
        of_model = Limit(f"user:{tenant}:{model}", "model", MODEL_RATE, MODEL_BURST, model)
        parts: list[Entry] = []
        for text in ("", *texts):
            id = f"id-{next(self.numbers)}"
            limits = () if parts else tuple(counting_as(limit, len(texts) + 1) for limit in (of_all, of_model))
            parts.append(self.ask(text or f"input of {id}", id=id, limits=limits, **who))
        verdicts = self.do(self.door(peer).enqueue(parts))
        if not self.offered_several(parts, verdicts, self.harness.now()):
            self.let_go(self.several.pop(), who["gateway"], peer)

    @precondition(lambda self: self.several)
    @rule(data=st.data(), peer=st.booleans())
    def leave_with_several(self, data: st.DataObject, peer: bool) -> None:
        parts = self.several.pop(data.draw(st.integers(0, len(self.several) - 1), label="request"))
        self.let_go(parts, self.let_in[parts[0]].entry.gateway, peer)

    @precondition(lambda self: any(map(self.abandoned, self.several)))
    @rule(peer=st.booleans())
    def abandon_what_failed(self, peer: bool) -> None:
        """The first failure is the outcome of the whole request: its other parts are withdrawn."""
        for parts in [parts for parts in self.several if self.abandoned(parts)]:
            self.several.remove(parts)
            self.let_go(parts, self.let_in[parts[0]].entry.gateway, peer)

    @rule(
        text=st.sampled_from(TEXTS),
        tenant=st.sampled_from(TENANTS),
        caller=st.sampled_from(CALLERS),
        limit=st.sampled_from([1, MAX_BATCH]),
        cause=st.sampled_from(Cause),
    )
    def fail_for_good(self, text: str, tenant: str, caller: str, limit: int, cause: Cause) -> None:
        """An input fails whenever it runs, and the entries in other batches are answered."""
        entry = self.ask(text, id=f"id-{next(self.numbers)}", tenant=tenant, caller=caller, gateway=GATEWAYS[0])
        [verdict] = self.do(self.broker.enqueue([entry]))
        self.note(entry, verdict)
        for _ in range(2 * MOST_ATTEMPTS):
            if self.do(self.broker.state(tenant, entry.id)) is None:
                break
            self.advance(0.6)
            before = len(self.leases)
            self.claim(WORKERS[0], "m", limit, patient=False)
            if len(self.leases) > before:
                held = self.leases.pop()
                if entry in held.lease.entries:
                    self.end_in_failure(held, cause)
                else:
                    self.answer(held)

    def note(self, entry: Entry, verdict: Failure | None) -> None:
        self.offered(entry, verdict, self.harness.now())

    @precondition(lambda self: self.let_in)
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS), peer=st.booleans())
    def use_an_id_again(self, data: st.DataObject, gateway: str, peer: bool) -> None:
        """Law 6: an id can't be reused while it is live. Afterwards it can, whether its answer was read or not."""
        tenant, id, nonce = self.latest[data.draw(st.sampled_from(list(self.latest)))]
        model = str(self.let_in[tenant, id, nonce].entry.queue)
        entry = self.ask(
            f"again {nonce}", id=id, tenant=tenant, model=model, gateway=gateway, nonce=nonce + 1, timeout=20.0
        )
        live = self.do(self.broker.state(tenant, id)) is not None
        [verdict] = self.do(self.door(peer).enqueue([entry]))
        if live:
            assert verdict is not None
            assert verdict.code == errors.IDEMPOTENCY_CONFLICT
        else:
            self.note(entry, verdict)

    @precondition(lambda self: self.let_in)
    @rule(data=st.data())
    def enqueue_again(self, data: st.DataObject) -> None:
        """Law 6: sending the same entry again changes nothing."""
        again = [
            known.entry
            for known in map(self.let_in.__getitem__, self.latest.values())
            if not known.cancelled and key(known.entry) not in self.outcomes
        ]
        if again:
            chosen = data.draw(st.lists(st.sampled_from(again), max_size=3))
            assert all(verdict is None for _, verdict in self.offer(chosen))

    @rule(
        worker=st.sampled_from(WORKERS),
        model=st.sampled_from(NAMED_QUEUES),
        limit=st.integers(1, MAX_BATCH),
        patient=st.booleans(),
    )
    def claim(self, worker: str, model: str, limit: int, patient: bool) -> None:
        claimed = self.do(self.broker.claim(slot(worker, model, limit), WHEN_FULL if patient else AT_ONCE))
        now = self.harness.now()
        if isinstance(claimed, NoWork):
            assert claimed.until is None or claimed.until > now
            return
        self.claimed(claimed, model, limit, now, self.harness.lease_seconds)

    def answer(self, held: Held) -> None:
        lease = held.lease
        items = [ItemResult(output(rider.input)) for rider in lease.entries]
        assert not self.do(self.broker.complete(lease, items)).fenced

    def pick(self, data: st.DataObject) -> Held:
        return self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1), label="lease"))

    def settle(self, held: Held, valid: bool) -> None:
        self.settled(held, valid, self.harness.now())

    def end_in_failure(self, held: Held, cause: Cause, places: Sequence[int] = ()) -> None:
        """Fail a lease. `places` are those of the call that failed, if it wasn't the whole batch."""
        failure = msgspec.structs.replace(failed(cause, held.lease.slot.worker), places=tuple(places))
        valid = self.do(self.broker.release(held.lease, failure))
        self.settle(held, valid)
        self.failed_together(held, places if valid else ())
        if valid and cause in BLAMED:
            known, ended_at = set(self.outcomes), self.harness.now()
            self.failed |= {
                key(rider)
                for place, rider in enumerate(held.lease.entries)
                if not places or place in places or rider.tier >= LIMITS.tiers
            }
            for gateway in GATEWAYS:
                self.read(gateway, acknowledge=False)
            for rider in held.lease.entries:
                if rider.tier >= LIMITS.tiers:
                    continue
                ended = self.outcomes.get(key(rider)) if key(rider) not in known else None
                if ended is not None and ended.failure is not None and ended.failure.code == errors.REJECTED_BY_MODEL:
                    self.culprits.found(rider, cause, ended_at)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), wrong=st.sets(st.integers(0, MAX_BATCH - 1), max_size=2))
    def complete(self, data: st.DataObject, wrong: set[int]) -> None:
        self.come_back(self.pick(data), wrong, set())

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), wrong=st.sets(st.integers(0, MAX_BATCH - 1), max_size=2))
    def leave_outputs_out(self, data: st.DataObject, wrong: set[int]) -> None:
        """The outputs were too large together: entries without an output run again."""
        held = self.pick(data)
        places = [place for place, rider in enumerate(held.lease.entries) if rider.tier < LIMITS.tiers]
        left_out = data.draw(st.sets(st.sampled_from(places), min_size=1)) if places else set[int]()
        self.come_back(held, wrong - left_out, left_out)

    def come_back(self, held: Held, wrong: set[int], left_out: set[int]) -> None:
        """Complete a lease: errors for the places in `wrong`, nothing for those in `left_out`, outputs for the rest."""
        riders = held.lease.entries
        items = [
            ItemResult(None, "cannot" if place in wrong else None, left_out=LARGE_OUTPUT if place in left_out else 0)
            if place in wrong | left_out
            else ItemResult(output(rider.input))
            for place, rider in enumerate(riders)
        ]
        cancelled = sum(self.let_in[key(rider)].cancelled for rider in riders)
        again = sum(not self.let_in[key(riders[place])].cancelled for place in left_out)
        settled = self.do(self.broker.complete(held.lease, items))
        self.settle(held, not settled.fenced)
        if not settled.fenced:
            self.failed |= {key(rider) for place, rider in enumerate(riders) if place in wrong}
            assert (settled.answered, settled.departed) == (len(items) - cancelled - again, cancelled)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), cause=st.sampled_from(Cause))
    def fail(self, data: st.DataObject, cause: Cause) -> None:
        self.end_in_failure(self.pick(data), cause)

    @rule(worker=st.sampled_from(WORKERS))
    def retire(self, worker: str) -> None:
        """An autoscaler removes a slot once its batches have ended. Another slot may take its name later."""
        for held in [held for held in self.leases if held.lease.slot.worker == worker]:
            self.leases.remove(held)
            items = [ItemResult(output(rider.input)) for rider in held.lease.entries]
            self.settle(held, not self.do(self.broker.complete(held.lease, items)).fenced)
        self.do(beat(self.broker, worker, status=WorkerStatus.OFFLINE))
        self.culprits.workers_changed()

    @rule(worker=st.sampled_from(WORKERS))
    def hold(self, worker: str) -> None:
        self.do(beat(self.broker, worker, status=WorkerStatus.DRAINED))
        self.culprits.workers_changed()

    @rule(model=st.sampled_from(NAMED_QUEUES), times=st.integers(1, 6), cause=st.sampled_from(Cause))
    def keep_failing(self, model: str, times: int, cause: Cause) -> None:
        """Get far enough into the retry plan for an entry to run alone."""
        for _ in range(times):
            self.advance(0.6)
            before = len(self.leases)
            self.claim(WORKERS[0], model, MAX_BATCH, patient=False)
            if len(self.leases) > before:
                self.end_in_failure(self.leases.pop(), cause)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Law 4: giving back charges nothing."""
        held = self.pick(data)
        valid = self.do(self.broker.release(held.lease))
        self.settle(held, valid)
        if valid:
            self.given_back(held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        held = self.pick(data)
        if self.do(self.broker.extend(held.lease)):
            held.expires_at = self.harness.now() + self.harness.lease_seconds
            self.leases.append(held)
        else:
            self.settle(held, valid=False)

    @precondition(lambda self: self.dead)
    @rule(data=st.data(), how=st.sampled_from(["complete", "fail", "give back", "extend"]))
    def use_a_dead_fence(self, data: st.DataObject, how: str) -> None:
        """Law 3: nothing changes."""
        lease = data.draw(st.sampled_from(self.dead)).lease
        if how == "complete":
            items = [ItemResult("out of time")] * len(lease.entries)
            assert self.do(self.broker.complete(lease, items)).fenced
        elif how == "extend":
            assert not self.do(self.broker.extend(lease))
        else:
            assert not self.do(self.broker.release(lease, failed() if how == "fail" else None))

    @precondition(lambda self: self.let_in)
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS), peer=st.booleans())
    def withdraw(self, data: st.DataObject, gateway: str, peer: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.let_in)), max_size=4, unique=True))
        self.let_go([*chosen, ("nobody", "nothing", 0)], gateway, peer)

    def let_go(self, chosen: Sequence[Submission], gateway: str, peer: bool) -> None:
        """Withdraw submissions. Those that `gateway` holds are no longer live afterwards."""
        known = [one for one in chosen if one in self.let_in]
        mine = [one for one in known if self.let_in[one].entry.gateway == gateway and one in self.latest.values()]
        door = self.door(peer)
        # Gateways withdraw what their own process offered. A peer acting for one must hear of the queue first.
        standing = [self.do(door.state(*one[:2])) for one in mine]
        self.do(door.withdraw(list(chosen), gateway))
        for one, stage in zip(mine, standing, strict=True):
            if stage is not None:
                self.let_in[one].cancelled = True
                assert self.do(self.broker.state(*one[:2])) is None

    @precondition(lambda self: self.let_in)
    @rule(data=st.data())
    def cancel_what_is_no_task(self, data: st.DataObject) -> None:
        """Law 8: nothing happens."""
        self.do(self.broker.cancel_task(*data.draw(st.sampled_from(list(self.latest)))))

    @rule(gateway=st.sampled_from(GATEWAYS), acknowledge=st.booleans())
    def read(self, gateway: str, acknowledge: bool) -> None:
        """Law 5: a reply comes again until it is acknowledged."""
        replies, cursor = self.do(self._read(gateway, self.cursors[gateway]))
        for reply in replies:
            self.answered(reply, gateway)
        if acknowledge:
            self.cursors[gateway] = cursor

    async def _read(self, gateway: str, after: int) -> tuple[list[Reply], int]:
        reader = asyncio.ensure_future(self.broker.replies(gateway, after))
        # The first read of a queue for a gateway waits for other first reads, so its replies come later.
        await self.harness.advance(self.harness.first_read)
        await self.harness.settle()
        if not reader.done():
            reader.cancel()
            return [], after
        replies, cursor = await reader
        return list(replies), cursor

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.1, 0.6, 2.5]))
    def advance(self, seconds: float) -> None:
        self.do(self.harness.advance(seconds))

    @rule()
    def outlive_a_lease(self) -> None:
        self.do(self.harness.advance(self.harness.lease_seconds + 0.1))

    @precondition(lambda self: self.failed)
    @rule()
    def outlive_what_is_known(self) -> None:
        """Wait until no failed inputs are remembered, so that all of them run again."""
        self.do(self.harness.advance(KNOWN_SECONDS + 0.1))
        who = [{"tenant": tenant, "caller": CALLERS[0], "model": "m", "gateway": GATEWAYS[0]} for tenant in TENANTS]
        self.ask_the_same([*itertools.product(TEXTS, who)], False)

    @rule()
    def reap(self) -> None:
        self.culprits.workers_changed()
        assert self.do(self.broker.reap()) > 0.0
        now = self.harness.now()
        for held in [held for held in self.leases if held.expires_at <= now]:
            self.leases.remove(held)
            self.settle(held, valid=False)

    @invariant()
    def all_are_somewhere(self) -> None:
        if next(self.steps) % self.look_every == 0:
            self.look()

    def look(self) -> None:
        states, depths = self.do(self._look())
        self.everything_is_somewhere(states, depths, self.harness.now())

    async def _look(self) -> tuple[dict[Submission, EntryState | None], Sequence[TierDepth]]:
        stages = {one: await self.broker.state(*one[:2]) for one in self.latest.values()}
        return stages, await self.broker.depths()

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.harness.close()

    def drain(self) -> None:
        """Run what is left, let all leases expire, run what comes back, and read every reply."""
        self.look()
        for _ in range(100):
            self.advance(0.6)
            ran = [self.run_one(model) for model in NAMED_QUEUES]
            if not any(ran):
                if not self.leases and not any(one.depth for one in self.do(self.broker.depths())):
                    break
                self.outlive_a_lease()
                self.reap()
        for gateway in GATEWAYS * (1 + len(NAMED_QUEUES)):  # Each queue has its own replies.
            self.read(gateway, acknowledge=True)
            self.advance(0.1)
        self.everything_has_ended()
        assert not self.harness.apart("RQK")
        assert not any(one.depth for one in self.do(self.broker.depths()))
        for model in NAMED_QUEUES:
            assert self.do(self.broker.claim(slot(LAST, model), AT_ONCE)) == NoWork(None)

    def run_one(self, model: str) -> bool:
        before = len(self.leases)
        self.claim(LAST, model, MAX_BATCH, patient=False)
        if len(self.leases) == before:
            return False
        self.answer(self.leases.pop())
        return True


class BulkLaws(BrokerLaws):
    @rule(who=WHO, count=st.integers(1, 10), shape=st.sampled_from([0, 0, 1, 2]), peer=st.booleans())
    def enqueue_bulk(self, who: dict[str, str], count: int, shape: int, peer: bool) -> None:
        how = {**who, "caller": "", "shape": shape, "tier": LIMITS.tiers, "queue_timeout": 1e6, "timeout": 1e6}
        lines = [self.ask(id=f"id-{next(self.numbers)}", **how) for _ in range(count)]
        for entry, verdict in zip(lines, self.do(self.door(peer).enqueue_bulk(lines)), strict=True):
            if verdict is None:
                self.note(entry, None)
            else:
                assert verdict.code == errors.SHED

    @rule()
    def be_quiet(self) -> None:
        """Send nothing until all GPUs are for bulk entries."""
        self.do(self.harness.advance(QUIET))

    def drain(self) -> None:
        for _ in range(3 * BATCHES_WAITING):
            self.be_quiet()
            for model in NAMED_QUEUES:
                self.run_one(model)
        super().drain()


class RowsLaws(BrokerLaws):
    """Both models take tensors, so an entry weighs its rows. The second also limits batches by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = {model: limits.counting_rows() for model, limits in QUEUES.items()}
        for model in QUEUES:
            self.do(beat(self.broker, f"of {model}", model=model, takes=ValueKind.TENSORS.value))
        self.do(self.harness.peer().workers())

    def ask(self, *what: Any, weight: int = 1, **how: Any) -> Entry:
        """Make an entry of one of two shapes, with `weight` rows but at most as many as a batch."""
        entry, rows = ask(*what, **how), min(weight, MAX_BATCH)
        of_rows = self.bounds[entry.model]
        value = tensors(rows, str(entry.input).encode())
        return msgspec.structs.replace(entry, input=value, weight=int(rows * of_rows.unit), shape=rows % 2)


@pytest.mark.parametrize("kind", HARNESSES)
def test_the_laws_hold_with_bulk(kind: str, servers: SharedServers) -> None:
    made = staticmethod(lambda: HARNESSES[kind](servers))
    run_state_machine_as_test(type("Laws", (BulkLaws,), {"made": made}), settings=EXPLORE_ALIKE)


@pytest.mark.parametrize("kind", HARNESSES)
def test_the_laws_hold_of_rows(kind: str, servers: SharedServers) -> None:
    made = staticmethod(lambda: HARNESSES[kind](servers))
    run_state_machine_as_test(type("Laws", (RowsLaws,), {"made": made}), settings=EXPLORE_ALIKE)


@pytest.mark.parametrize("kind", HARNESSES)
def test_the_laws_hold_however_things_interleave(kind: str, servers: SharedServers) -> None:
    made = staticmethod(lambda: HARNESSES[kind](servers))
    explore = EXPLORED.get(kind, EXPLORE_ALIKE)
    run_state_machine_as_test(type("Laws", (BrokerLaws,), {"made": made}), settings=explore)
