"""Requests that share an answer get the right one, and get it once, whatever happens in whatever order. A naive model
of what was admitted checks this; a rate-limit bucket counts everybody's requests."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from headway import errors
from headway.model import (
    Cause,
    DedupKind,
    Entry,
    EntryState,
    ItemResult,
    Lease,
    Limit,
    ModelReport,
    Reply,
    Slot,
    WorkerStatus,
)
from tests.contracts.broker_model import Culprits
from tests.contracts.brokers import AT_ONCE, HARNESSES, MAX_BATCH, Harness, ask, beat, failed, output, slot
from tests.contracts.brokers import queue as queue_name
from tests.contracts.dedup_keys import TTL, key, poll, renewing, same, task
from tests.servers.redis import SharedServers

T = TypeVar("T")
Key = tuple[str, str]

GATEWAYS = ("g1", "g2")
LIMIT = Limit("key:k", "key", 600.0, 12.0)
BOUNDARY = 0.01
"""Requests by which the bucket may be off."""
EXPLORE = settings(max_examples=50, stateful_step_count=40)
EXPLORED = {"memory": EXPLORE, "near": EXPLORE, "valkey": settings(EXPLORE, max_examples=15)}
EXPLORE_ALIKE = settings(EXPLORE, max_examples=6)

ASKED = st.tuples(
    st.sampled_from("ttttttu"),
    st.sampled_from("aaaaab"),
    st.sampled_from(["s", "s", "ks", "k", "tks", "tk", "t", "r", "tr"]),
    st.sampled_from(GATEWAYS),
    st.sampled_from([1.0, 30.0, 200.0]),
    st.sampled_from([False, False, True]),
    st.sampled_from(["ann", ""]),
    st.sampled_from(["", "", "3"]),
)
"""Tenant, input, kinds of sharing (`r`: like `s`, but renews), gateway, time, whether it counts towards the limit, caller, version."""
QUEUES = ("m", "m@3")


def said(lease: Lease) -> list[ItemResult]:
    return [ItemResult(f"{output(rider.input)!s}|{lease.slot.runs.target}") for rider in lease.entries]


def _key_of(entry: Entry) -> Key | None:
    return next(((entry.tenant, one.key) for one in entry.dedup_keys if one.kind is DedupKind.KEY), None)


def _kinds(asked: Entry) -> set[DedupKind]:
    return {share.kind for share in asked.dedup_keys}


class SharingLaws(RuleBasedStateMachine):
    made: Callable[[], Harness]

    def __init__(self) -> None:
        super().__init__()
        self.harness = self.made()
        self.broker = self.harness.broker
        self.do(self._hear_of_the_version())
        self.let_in: dict[Key, Entry] = {}
        self.texts: dict[Key, str] = {}
        self.gone: set[Key] = set()
        self.deleted: set[Key] = set()
        self.outcomes: dict[Key, Reply] = {}
        self.cursors = dict.fromkeys(GATEWAYS, 0)
        self.leases: list[Lease] = []
        self.codes: dict[str, list[str]] = {queue: [""] for queue in QUEUES}
        """Successive codes of each queue's worker; the last one answers."""
        self.since: dict[Key, int] = {}
        """Number of codes that the queue had had when each entry came."""
        self.culprits = Culprits()
        self.numbers = itertools.count()
        self.tokens, self.filled_at = LIMIT.burst, self.harness.now()

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        return self.harness.run(act)

    async def _hear_of_the_version(self) -> None:
        """Let gateways hear about the version, as from its workers' heartbeats."""
        name = queue_name(QUEUES[1])
        await beat(self.broker, "old", model=name.model, status=WorkerStatus.STARTING, version=name.version)
        for broker in (self.broker, self.harness.peer()):
            await broker.workers()

    def fill(self) -> None:
        now = self.harness.now()
        self.tokens = min(LIMIT.burst, self.tokens + (now - self.filled_at) * LIMIT.rate / 60.0)
        self.filled_at = now

    @rule(several=st.lists(ASKED, min_size=1, max_size=5), peer=st.booleans())
    def enqueue(self, several: list[tuple[str, str, str, str, float, bool, str, str]], peer: bool) -> None:
        entries = []
        for tenant, text, kinds, gateway, timeout, limited, caller, version in several:
            id = f"id-{next(self.numbers)}"
            dedup_keys = {
                "t": task(id), "k": key("k", text.encode(), 5.0), "s": same(f"{text}@{version}", 5.0),
                "r": renewing(f"{text}@{version}", 5.0),
            }  # fmt: skip
            entries.append(
                ask(
                    text, id=id, tenant=tenant, gateway=gateway, timeout=timeout, queue_timeout=timeout, caller=caller,
                    version=version, limits=(LIMIT,) if limited else (), dedup_keys=tuple(dedup_keys[kind] for kind in kinds),
                )
            )  # fmt: skip
        self.fill()
        broker = self.harness.peer() if peer else self.broker
        for entry, verdict in zip(entries, self.do(broker.enqueue(entries)), strict=True):
            over = verdict is not None and verdict.code == errors.RATE_LIMITED
            assert entry.limits or not over
            if entry.limits:
                assert self.tokens < 1.0 + BOUNDARY if over else self.tokens > 1.0 - BOUNDARY
            if self.culprits.judge(entry, verdict, self.harness.now(), runs=False):
                self.tokens -= len(entry.limits)
            elif verdict is None:
                self.tokens -= len(entry.limits)
                self.admit(entry, str(entry.input))
            else:
                assert verdict is not None
                known = (errors.RATE_LIMITED, errors.IDEMPOTENCY_MISUSE, errors.SHED, errors.SERVICE_OVERLOADED)
                assert verdict.code in known

    @rule(leaving=st.sets(st.integers(0, 2)), timeout=st.sampled_from([1.0, 200.0]))
    def chain(self, leaving: set[int], timeout: float) -> None:
        """The second entry joins the first, the third joins the second; some leave immediately."""
        text = f"text {next(self.numbers)}"
        dedup_keys = [(same(text),), (key(text), same(text)), (key(text),)]
        for number, has in enumerate(dedup_keys):
            entry = ask(text, id=f"{text} {number}", gateway="g1", dedup_keys=has, queue_timeout=timeout)
            if self.do(self.broker.enqueue([entry])) == [None]:
                self.admit(entry, text)
        for number in leaving:
            known = ("t", f"{text} {number}")
            if self.do(self.broker.state(*known)) is not None:
                self.gone.add(known)
            self.do(self.broker.withdraw([(*known, 0)], "g1"))

    @rule(queue=st.sampled_from(QUEUES), changes=st.booleans())
    def beat(self, queue: str, changes: bool) -> None:
        """The only worker of a queue sends a heartbeat, perhaps with code not seen before."""
        if changes:
            self.codes[queue].append(f"code {next(self.numbers)}")
        runs = ModelReport("", self.codes[queue][-1])
        name = queue_name(queue)
        self.do(beat(self.broker, f"of {queue}", model=name.model, runs=runs, version=name.version))
        self.culprits.workers_changed()

    def slot(self, worker: str, queue: str, limit: int = MAX_BATCH, old: int = 0) -> Slot:
        """A slot with a queue's latest code, or with older code, like a worker that hasn't heard yet."""
        codes = self.codes[queue]
        return msgspec.structs.replace(slot(worker, queue, limit), runs=ModelReport("", codes[-1 - old % len(codes)]))

    def admit(self, asked: Entry, text: str) -> None:
        self.let_in[asked.tenant, asked.id] = asked
        self.since[asked.tenant, asked.id] = len(self.codes[str(asked.queue)])
        self.texts[asked.tenant, asked.id] = text

    @precondition(lambda self: self.let_in)
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS), timeout=st.sampled_from([1.0, 200.0]))
    def wait_for(self, data: st.DataObject, gateway: str, timeout: float) -> None:
        tenant, id = data.draw(st.sampled_from(list(self.let_in)[-6:]))
        following = poll(f"poll-{next(self.numbers)}", id, tenant=tenant, gateway=gateway, timeout=timeout)
        [verdict] = self.do(self.broker.enqueue([following]))
        if verdict is None:
            known = self.let_in[tenant, id]
            assert any(share.kind is DedupKind.TASK and share.key == id for share in known.dedup_keys)
            self.admit(following, self.texts[tenant, id])
        else:
            assert verdict.code == errors.NOT_FOUND

    @precondition(lambda self: self.let_in)
    @rule(data=st.data())
    def enqueue_again(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(list(self.let_in)))
        if known not in self.gone and known not in self.outcomes:
            assert self.do(self.harness.peer().enqueue([self.let_in[known]])) == [None]

    @rule(
        limit=st.integers(1, 4), times=st.integers(1, 2), queue=st.sampled_from(QUEUES), old=st.sampled_from([0, 0, 1])
    )
    def claim(self, limit: int, times: int, queue: str, old: int) -> None:
        for number in range(times):
            claimed = self.do(self.broker.claim(self.slot(f"gpu-{number}", queue, limit, old), AT_ONCE))
            if isinstance(claimed, Lease):
                assert all(not rider.id.startswith("poll") for rider in claimed.entries)
                self.runs_once(claimed)
                self.leases.append(claimed)

    def runs_once(self, claimed: Lease) -> None:
        """Entries with a key run once at a time, whatever their version."""
        now = self.harness.now()
        running = [rider for lease in self.leases if lease.expires_at > now for rider in lease.entries]
        keys = [
            _key_of(rider) for rider in [*running, *claimed.entries] if (rider.tenant, rider.id) not in self.deleted
        ]
        assert all(count == 1 for whose, count in Counter(keys).items() if whose)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), wrong=st.booleans())
    def complete(self, data: st.DataObject, wrong: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.do(
            self.broker.complete(lease, [ItemResult(None, "cannot")] * len(lease.entries) if wrong else said(lease))
        )

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), cause=st.sampled_from([None, Cause.RAISED, Cause.REMOTE]))
    def release(self, data: st.DataObject, cause: Cause | None) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if self.do(self.broker.release(lease, None if cause is None else failed(cause))) and cause is Cause.RAISED:
            for rider in lease.entries:  # Entries that run only for others aren't reported.
                self.culprits.perhaps(rider, self.harness.now())

    @precondition(lambda self: self.let_in)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Law 8: an outcome doesn't change."""
        chosen = data.draw(st.sampled_from(list(self.let_in)[-6:]))
        standing, kept = self.do(self.broker.state(*chosen)), self.do(self.broker.outcome(*chosen))
        self.do(self.harness.peer().withdraw([(*chosen, 0)], self.let_in[chosen].gateway))
        assert self.do(self.broker.state(*chosen)) is None
        if standing is not None:
            self.gone.add(chosen)
            assert self.do(self.broker.outcome(*chosen)) is None
        else:
            assert self.do(self.broker.outcome(*chosen)) == kept

    @precondition(lambda self: self.let_in)
    @rule(data=st.data(), nonce=st.sampled_from([0, 1]))
    def withdraw_for_nobody(self, data: st.DataObject, nonce: int) -> None:
        """Law 8: another gateway or another submission can't withdraw anything."""
        chosen = data.draw(st.sampled_from(list(self.let_in)[-6:]))
        before = self.do(self.broker.state(*chosen)), self.do(self.broker.outcome(*chosen))
        whose = "nobody" if nonce == 0 else self.let_in[chosen].gateway
        self.do(self.broker.withdraw([(*chosen, nonce)], whose))
        assert before == (self.do(self.broker.state(*chosen)), self.do(self.broker.outcome(*chosen)))

    @precondition(lambda self: self.let_in)
    @rule(data=st.data())
    def cancel_task(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.let_in)[-6:]))
        before = self.do(self.broker.state(*chosen)), self.do(self.broker.outcome(*chosen))
        self.deleted.add(chosen)
        self.do(self.harness.peer().cancel_task(*chosen))
        assert self.do(self.broker.outcome(*chosen)) is None
        if isinstance(before[1], EntryState):
            assert self.do(self.broker.state(*chosen)) is None
        else:
            assert self.do(self.broker.state(*chosen)) is before[0]

    @precondition(lambda self: self.let_in)
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS))
    def use_an_id_again(self, data: st.DataObject, gateway: str) -> None:
        """Law 6: another submission under a live id is a conflict, and the first doesn't notice it."""
        chosen = data.draw(st.sampled_from(list(self.let_in)[-6:]))
        entry = self.let_in[chosen]
        if self.do(self.broker.state(*chosen)) is not None:
            nonce = 1 if gateway == entry.gateway else entry.nonce
            how = {"digest": b"another", "nonce": nonce}  # Without a digest, no client has chosen the id.
            other = ask("another text", id=entry.id, tenant=entry.tenant, gateway=gateway, **how)  # type: ignore[arg-type]
            [verdict] = self.do(self.harness.peer().enqueue([other]))
            assert verdict is not None
            assert verdict.code == errors.IDEMPOTENCY_CONFLICT

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.1, 6.0]))
    def advance(self, seconds: float) -> None:
        self.do(self.harness.advance(seconds))

    @rule()
    def reap(self) -> None:
        self.do(self.broker.reap())

    @rule(gateway=st.sampled_from(GATEWAYS))
    def read(self, gateway: str) -> None:
        for reply in self.do(self._read(gateway)):
            known = reply.tenant, reply.id
            assert known not in self.gone
            assert known not in self.outcomes
            assert reply.nonce == self.let_in[known].nonce
            self.outcomes[known] = reply
            assert self.let_in[known].gateway == gateway
            assert (reply.output is None) != (reply.failure is None)
            if reply.output is not None:
                told, _, code = str(reply.output).partition("|")
                assert told == output(self.texts[known])
                self.is_of_present_code(reply, code)
            assert not reply.kept or reply.shared is not None
            assert reply.shared is None or reply.shared in _kinds(self.let_in[known])
            assert self.do(self.broker.state(*known)) is None

    def is_of_present_code(self, reply: Reply, code: str) -> None:
        """Answers kept for identical requests come from the code that was current when these came, or newer."""
        if reply.shared is DedupKind.SAME and reply.kept:
            known = reply.tenant, reply.id
            assert code in self.codes[str(self.let_in[known].queue)][self.since[known] - 1 :]

    async def _read(self, gateway: str) -> list[Reply]:
        reader = asyncio.ensure_future(self.broker.replies(gateway, self.cursors[gateway]))
        await self.harness.settle()
        if not reader.done():
            reader.cancel()
            return []
        replies, self.cursors[gateway] = await reader
        return list(replies)

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.harness.close()

    def anything_waits(self) -> bool:
        if any(one.depth for one in self.do(self.broker.depths())):
            return True
        return any(self.do(self.broker.state(*known)) is not None for known in self.let_in)

    def drain(self) -> None:
        """Run what is left: every entry that wasn't withdrawn has one outcome, and nothing waits or runs."""
        for _ in range(60):
            self.advance(0.6)
            claims = [self.do(self.broker.claim(self.slot("last", queue), AT_ONCE)) for queue in QUEUES]
            leases = [claimed for claimed in claims if isinstance(claimed, Lease)]
            for lease in leases:
                self.do(self.broker.complete(lease, said(lease)))
            if leases:
                continue
            if not self.anything_waits():
                break
            self.do(self.harness.advance(self.harness.lease_seconds))
            self.reap()
        for gateway in GATEWAYS * len(QUEUES):  # Each queue has its own replies.
            self.read(gateway)
        assert set(self.outcomes) == set(self.let_in) - self.gone
        assert not any(one.depth for one in self.do(self.broker.depths()))
        for tenant, id in self.let_in:
            assert not isinstance(self.do(self.broker.outcome(tenant, id)), EntryState)
        self.do(self.harness.advance(TTL))
        self.reap()
        for gateway in GATEWAYS * (1 + len(QUEUES)):
            self.read(gateway)
            self.advance(0.1)
        assert not self.harness.apart("RQK"), "nobody waits for it, and nothing is kept any more"


@pytest.mark.parametrize("kind", HARNESSES)
def test_answers_in_common_come_to_everybody_once_however_things_interleave(kind: str, servers: SharedServers) -> None:
    made = staticmethod(lambda: HARNESSES[kind](servers))
    explore = EXPLORED.get(kind, EXPLORE_ALIKE)
    run_state_machine_as_test(type("Laws", (SharingLaws,), {"made": made}), settings=explore)
