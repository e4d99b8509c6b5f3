"""Deduplication against a naive model: which entry leads, which join, what each gets, and that nothing leaks."""

import itertools
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headway import errors
from headway.core import failures
from headway.core.dedup import Consequences, Dedup, keeps
from headway.core.fair_queue import QueuedEntry, queued_at
from headway.model import DedupKey, DedupKind, Entry, Failure, Reply, Value
from tests.core.flights import LATE, NOW, PLENTY, left_over, make

FlightKey = tuple[str, DedupKind, str]
Heard = tuple[str, Value | None, Failure | None, DedupKind | None, bool]
"""Reply as a client hears it: id, output, failure, kind of the dedup key, and whether it was kept."""

OUTCOMES: dict[str, tuple[str | None, Failure | None]] = {
    "output": ("fine", None),
    "rejected": (None, Failure(errors.REJECTED_BY_MODEL, "no such word")),
    "broken": (None, Failure(errors.BACKEND_ERROR, "it raised")),
}
FULL = Failure(errors.SERVICE_OVERLOADED, "no room")

ASKERS = st.tuples(
    st.sampled_from("ttttu"),
    st.sampled_from(["s", "ks", "k", "tks", "tk", "ts", "t", "sk"]),
    st.sampled_from([b"one"] * 5 + [b"other"]),
    st.sampled_from("sssr"),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0.0, 5.0, 30.0]),
    st.sampled_from([2.0, 20.0, 60.0]),
)
"""Tenant, kinds of shares, digest under the key, what is asked, whether it joins, how long that is kept, its time."""


class Asker:
    """An entry as the model sees it."""

    def __init__(self, queued: QueuedEntry, at: int) -> None:
        self.queued = queued
        self.entry = queued.entry
        queued.reservation = "a room"
        self.at = at
        self.follows: tuple[Asker, FlightKey] | None = None  # The entry whose outcome it waits for, and the key.
        self.begins: list[FlightKey] = []  # Keys that it leads.
        self.left = False  # True once cancelled. It may keep running for others.
        self.over = False  # True once it has its outcome or was dropped.
        self.heard: list[Heard] = []


class Kept(NamedTuple):
    digest: bytes
    output: str | None
    failure: Failure | None
    until: float


class SharingLaws(RuleBasedStateMachine):
    """Finds each answer by searching all entries; stores nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing = Dedup(PLENTY)
        self.now = NOW
        self.askers: list[Asker] = []
        self.kept: dict[FlightKey, Kept] = {}
        self.full = False
        self.numbers = itertools.count()

    # The model.

    def alive(self) -> list[Asker]:
        return [asker for asker in self.askers if not asker.over]

    def running(self) -> list[Asker]:
        return [asker for asker in self.alive() if asker.follows is None]

    def followers(self, asker: Asker, key: FlightKey | None = None) -> list[Asker]:
        found = [one for one in self.alive() if one.follows is not None and one.follows[0] is asker]
        return sorted((one for one in found if key is None or one.follows[1] == key), key=lambda one: one.at)  # type: ignore[index]

    def needed(self, asker: Asker) -> bool:
        if not asker.left or any(kind is DedupKind.KEY for _, kind, _ in asker.begins):
            return True
        return any(map(self.needed, self.followers(asker)))

    def original(self, key: FlightKey) -> Asker | None:
        found = [asker for asker in self.alive() if key in asker.begins]
        assert len(found) <= 1
        return found[0] if found else None

    def digest_of(self, asker: Asker, key: FlightKey) -> bytes:
        return next(share.digest for share in asker.entry.dedup_keys if keyed(asker.entry, share) == key)

    def take_leads(self, asker: Asker) -> None:
        asker.begins = [
            key
            for share in asker.entry.dedup_keys
            if (key := keyed(asker.entry, share)) not in self.kept
            and self.original(key) is None
            and (share.kind is not DedupKind.TASK or share.key == asker.entry.id)
        ]

    def said(self, asker: Asker) -> str | Asker | tuple[DedupKind, Kept] | None:
        """Return what a new entry gets: an error code, the entry it joins, its answer, or None if it runs."""
        for share in asker.entry.dedup_keys:
            key = keyed(asker.entry, share)
            kept, original = self.kept.get(key), self.original(key)
            if kept is None and original is None:
                if share.kind is DedupKind.TASK and share.key != asker.entry.id:
                    return errors.NOT_FOUND
                continue
            held = kept.digest if kept is not None else self.digest_of(original, key)  # type: ignore[arg-type]
            if held != share.digest:
                return errors.IDEMPOTENCY_MISUSE
            if kept is not None:
                return share.kind, kept
            if share.joins:
                assert original is not None
                asker.follows = original, key
                return original
        return None

    def ended(
        self, asker: Asker, output: str | None, failure: Failure | None, late: bool
    ) -> tuple[list[Heard], list[Asker]]:
        """Return the replies that an end causes, and the entries that are offered again."""
        heard: list[Heard] = []
        anew: list[Asker] = []
        for key in asker.begins:
            share = next(share for share in asker.entry.dedup_keys if keyed(asker.entry, share) == key)
            followers = self.followers(asker, key)
            asker.begins = [other for other in asker.begins if other != key]
            if late and share.kind is not DedupKind.TASK:
                for follower in followers:
                    follower.follows = None
                loose = list(followers)
                for one in loose:
                    below = self.followers(one)
                    below.sort(key=lambda follower: (one.begins.index(follower.follows[1]), follower.at))  # type: ignore[index]
                    for follower in below:
                        follower.follows = None
                    loose += below
                    one.begins = []
                    if one.left:
                        one.over = True
                    else:
                        anew.append(one)
            else:
                for follower in followers:
                    if not follower.left:
                        heard.append((follower.entry.id, output, failure, share.kind, False))
                    more = self.ended(follower, output, failure, late)
                    heard += more[0]
                    anew += more[1]
            if share.keep > 0.0 and keeps(share, Reply("", "", output, failure)):
                self.kept[key] = Kept(share.digest, output, failure, self.now + share.keep)
        asker.over, asker.follows = True, None
        return heard, anew

    def drop(self) -> set[QueuedEntry]:
        """Drop entries that nobody needs. Returns those that would have run."""
        idle = set()
        while gone := [asker for asker in self.alive() if not self.needed(asker)]:
            idle |= {asker.queued for asker in gone if asker.follows is None}
            for asker in gone:
                asker.over, asker.begins = True, []
        return idle

    # Actions on both.

    def offer(self, asker: Asker) -> Failure | None:
        said = self.said(asker)
        joined = self.sharing.join(asker.queued, self.now)
        if said is None:
            assert joined is None
            if self.full:
                return FULL
            self.take_leads(asker)
            self.sharing.begin(asker.queued, self.now)
            self.askers.append(asker)
            return None
        if isinstance(said, str):
            assert isinstance(joined, Failure)
            assert joined.code == said
            return joined
        assert isinstance(joined, Consequences)
        self.take_leads(asker)
        self.askers.append(asker)
        if isinstance(said, Asker):
            assert joined == Consequences()
            assert asker.queued in self.sharing.followers
            return None
        kind, kept = said
        heard, anew = self.ended(asker, kept.output, kept.failure, late=False)
        assert not anew
        self.hear(joined, [(asker.entry.id, kept.output, kept.failure, kind, True), *heard], anew, set())
        return None

    def hear(self, consequences: Consequences, heard: list[Heard], anew: list[Asker], idle: set[QueuedEntry]) -> None:
        got = []
        for queued, reply in consequences.replies:
            assert (reply.id, reply.tenant, reply.nonce) == (queued.entry.id, queued.entry.tenant, queued.entry.nonce)
            one = (reply.id, reply.output, reply.failure, reply.shared, reply.kept)
            got.append(one)
            asker = next(asker for asker in self.askers if asker.queued is queued)
            assert not asker.left
            asker.heard.append(one)
        assert sorted(got, key=str) == sorted(heard, key=str)
        assert set(consequences.idle) == idle
        assert consequences.reoffered == [asker.queued for asker in anew]
        for asker in anew:
            self.askers.remove(asker)
            asker.queued = queued_at(asker.entry, self.now)
            asker.at = next(self.numbers)
            refusal = self.offer(asker)
            if refusal is not None:
                self.sharing.begin(asker.queued, self.now)
                self.askers.append(asker)
                self.take_leads(asker)
                self.finish(asker, None, refusal)

    def finish(self, asker: Asker, output: str | None, failure: Failure | None, late: bool = False) -> None:
        assert self.sharing.unwanted(asker.queued) == asker.left
        if not asker.left:
            asker.heard.append((asker.entry.id, output, failure, None, False))
        consequences = self.sharing.end(
            asker.queued, Reply(asker.entry.id, asker.entry.tenant, output, failure), self.now, late=late
        )
        assert asker.queued.reservation is None
        heard, anew = self.ended(asker, output, failure, late)
        self.hear(consequences, heard, anew, set())

    @rule(askers=st.lists(ASKERS, min_size=1, max_size=4))
    def ask(self, askers: list[tuple[str, str, bytes, str, bool, float, float]]) -> None:
        for tenant, kinds, asked, other, joins, keep, timeout in askers:
            number = next(self.numbers)
            id = f"id-{number}"
            made = {
                "t": DedupKey(DedupKind.TASK, id, b"", 30.0),
                "k": DedupKey(DedupKind.KEY, "k", asked, 30.0),
                "s": DedupKey(DedupKind.SAME, other, b"", keep, joins),
            }
            entry = make(id, *(made[kind] for kind in kinds), tenant=tenant, timeout=timeout)
            self.offer(Asker(queued_at(entry, self.now), number))

    @precondition(lambda self: self.askers)
    @rule(data=st.data(), tenant=st.sampled_from("ttu"), timeout=st.sampled_from([2.0, 60.0]))
    def poll(self, data: st.DataObject, tenant: str, timeout: float) -> None:
        task = data.draw(st.sampled_from(self.askers[-5:])).entry.id
        number = next(self.numbers)
        entry = make(f"poll-{number}", DedupKey(DedupKind.TASK, task), tenant=tenant, timeout=timeout)
        self.offer(Asker(queued_at(entry, self.now), number))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), outcome=st.sampled_from(sorted(OUTCOMES)), late=st.booleans())
    def answer(self, data: st.DataObject, outcome: str, late: bool) -> None:
        asker = data.draw(st.sampled_from(self.running()))
        if late:
            self.finish(asker, None, LATE, late=True)
        else:
            self.finish(asker, *OUTCOMES[outcome])

    @precondition(lambda self: any(not asker.left for asker in self.alive()))
    @rule(data=st.data(), deleted=st.booleans())
    def cancel(self, data: st.DataObject, deleted: bool) -> None:
        asker = data.draw(st.sampled_from([asker for asker in self.alive() if not asker.left]))
        heard: list[Heard] = []
        for key in [key for key in asker.begins if key[1] is DedupKind.TASK]:
            for follower in self.followers(asker, key):
                heard.append((follower.entry.id, None, failures.no_task(), None, False))
                follower.over = True
            asker.begins.remove(key)
        if deleted:
            asker.begins = [key for key in asker.begins if key[1] is not DedupKind.KEY or self.followers(asker, key)]
        asker.left = True
        self.hear(self.sharing.cancel(asker.queued, deleted=deleted), heard, [], self.drop())

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        tenant, kind, id = data.draw(st.sampled_from(sorted(self.kept, key=str)))
        self.sharing.forget(tenant, id)
        if kind is DedupKind.TASK:
            del self.kept[tenant, kind, id]

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.kept = {key: kept for key, kept in self.kept.items() if kept.until > self.now}

    @rule()
    def reap(self) -> None:
        late = self.sharing.overdue(self.now)
        due = [asker for asker in self.alive() if asker.follows is not None and asker.queued.due <= self.now]
        assert {asker.queued for asker in due} == set(late)
        for queued in late:
            if queued not in self.sharing.followers:
                continue
            asker = next(asker for asker in self.alive() if asker.queued is queued)
            left = self.sharing.leave(queued)
            asker.follows = None
            asker.over = True  # It stops needing its original before it has its own outcome.
            idle = self.drop()
            asker.over = False
            self.finish(asker, None, LATE, late=True)
            self.hear(left, [], [], idle)

    @rule(full=st.booleans())
    def fill(self, full: bool) -> None:
        """While there is no room, entries are refused, even if offered again."""
        self.full = full

    @invariant()
    def everybody_hears_once(self) -> None:
        for asker in self.askers:
            assert len(asker.heard) <= 1
            assert not (asker.heard and not asker.over)
            assert not (asker.left and asker.over and asker.queued.reservation), "it gives its room back"

    @invariant()
    def tasks_are_known(self) -> None:
        for asker in self.askers:
            key = (asker.entry.tenant, DedupKind.TASK, asker.entry.id)
            found = self.sharing.outcome(*key[::2], self.now)
            if (original := self.original(key)) is not None:
                assert found is original.queued
            elif key in self.kept:
                assert isinstance(found, Reply)
                assert found.id == asker.entry.id
                assert (found.output, found.failure) == self.kept[key][1:3]
            else:
                assert found is None

    @invariant()
    def who_runs_for_whom(self) -> None:
        for asker in self.alive():
            top = asker
            while top.follows is not None:
                top = top.follows[0]
            assert self.sharing.original_of(asker.queued) is top.queued
            assert (asker.queued in self.sharing.followers) == (asker.follows is not None)
            assert self.sharing.unwanted(asker.queued) == asker.left

    def teardown(self) -> None:
        """Check that each entry got one reply unless withdrawn, and that nothing is left once kept answers expire."""
        self.full = False
        while running := self.running():
            self.finish(running[0], "fine", None)
        assert not self.alive()
        for asker in self.askers:
            assert len(asker.heard) == (0 if asker.left and not asker.heard else 1)
        self.now += 100.0
        assert self.sharing.overdue(self.now) == []
        assert left_over(self.sharing) == {}


def keyed(entry: Entry, share: DedupKey) -> FlightKey:
    return entry.tenant, share.kind, share.key


def test_agrees_with_a_naive_model_however_things_interleave() -> None:
    run_state_machine_as_test(
        SharingLaws, settings=settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=False)
    )
