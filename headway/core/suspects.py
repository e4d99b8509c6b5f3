"""Suspects: entries that wait apart, to run once more, to be searched for culprits, or as their caller rides apart.

A batch that failed holds a culprit. It is searched by halves, by Hwang's generalised binary splitting (Hwang, "A method
for detecting all defective members in a population by group testing", JASA 67, 1972): one *half* runs while the *rest*
waits.

    cut ──▶ half ──clean──▶ the rest holds the culprit: it is halved without a run of its own
              └──fails──▶ the half holds it, and is halved; of the rest nothing is known any more

What nothing is known of goes back to its caller's *quarantine*, where unknowns run together, and with them the fresh entries
of a caller that rides apart. While a batch has several callers it is cut between two of them, those with most entries
first, so that the innocent are answered before anything is halved. Nothing that was only inferred ends an entry: each
runs alone before it is given up.

Quarantines and halves share the GPUs with the tier queues: while those have a batch they get a tenant's fair share for each
caller with a quarantine, a caller with recent culprits only part of it, and whatever the tier queues leave. Between themselves they take
turns by GPU time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, islice

import msgspec

from headway.core.culprits import CallerKey, caller_of
from headway.core.fair_queue import RETRYING, QueuedEntry

FIRST, HALF, QUARANTINE, REST = 0, 1, 2, 3
"""Kinds of groups: goes ahead of all others, half of a batch with a culprit, may be clean, waits for a half's outcome."""
QUARANTINED_ATTEMPTS = 1
"""Runs that entries of a quarantine count as having had, if any of them had one. The quarantine may never be empty."""
LEAST_COST = 0.001
"""Least seconds that a run counts as, before a batch was measured."""
APART_PRICE = 4.0
"""Divisor of the fair share of the GPUs that a caller with recent culprits gets while others wait."""
SEARCH_PRICE = 3.0
"""Seconds of quarantines for each second of halves while both wait.

Fresh work keeps its share when many culprits are searched.
"""
MOST_CREDIT = 2.0
"""Full batches of GPU time that groups may save up while the tier queues go first."""


class Group(msgspec.Struct, eq=False):
    """Entries that wait to run together.

    Attributes:
        members: entries, in order.
        ready_at: instant from which they may run.
        kind: FIRST, HALF, QUARANTINE or REST.
        failures: number of their failures, each time as a whole or in a larger batch.
        attempts: runs that each has had.
        alone: number of these runs in which the only member ran alone.
        caller: caller that owns the quarantine.
        rest: entries beside a half, which hold the culprit if the half does not.
        avoid: a worker that they failed on, and until when others are waited for.
        hung: whether their last run was ended at the GPU deadline.
    """

    members: list[QueuedEntry]
    ready_at: float
    kind: int
    failures: int = 0
    attempts: int = 0
    alone: int = 0
    caller: CallerKey | None = None
    rest: Group | None = None
    avoid: str = ""
    avoid_until: float = -math.inf
    hung: bool = False

    def open_at(self, worker: str, others: bool) -> float:
        """Instant from which `worker` may take them; where there are others, not at once where they failed."""
        return self.avoid_until if others and worker == self.avoid else self.ready_at


class Choice(msgspec.Struct):
    """Group that a free worker may take first, group that it may take in turn, and the instant to look again."""

    first: Group | None = None
    turn: Group | None = None
    again: float = math.inf


class Suspects:
    """The groups of one queue, in the order in which they came."""

    def __init__(self) -> None:
        self.groups: dict[Group, None] = {}
        self.of: dict[QueuedEntry, Group] = {}
        self.due = math.inf
        """Lower bound on the last moments of all members, an instant."""
        self.credit = 0.0
        """GPU seconds that groups may take although the tier queues have a batch."""
        self._lean = 0.0
        """GPU seconds that halves took, at their price, beyond those of quarantines."""
        self._quarantines: dict[CallerKey, Group] = {}

    def quarantine(self, caller: CallerKey) -> Group | None:
        """Entries of a caller that may run together."""
        return self._quarantines.get(caller)

    @property
    def callers(self) -> int:
        """Callers that share the GPUs with the tier queues, at least one."""
        return len(self._quarantines) or 1

    def beside(self, caller: CallerKey) -> int:
        """Other callers that have a quarantine."""
        return len(self._quarantines) - (caller in self._quarantines)

    def add(self, group: Group) -> None:
        """Let a group wait."""
        self.groups[group] = None
        self._place(group, group.members)

    def join(self, caller: CallerKey, members: Sequence[QueuedEntry], like: Group, full: int) -> None:
        """Let entries wait in their caller's quarantine, as ready as `like`; at once when `full` of them are there."""
        quarantine = self._quarantines.get(caller)
        if quarantine is None:
            quarantine = self._quarantines[caller] = Group([], like.ready_at, QUARANTINE, caller=caller)
            self.groups[quarantine] = None
        quarantine.ready_at = min(quarantine.ready_at, like.ready_at)
        quarantine.failures = max(quarantine.failures, like.failures)
        if min(like.attempts, QUARANTINED_ATTEMPTS) > quarantine.attempts:
            quarantine.attempts = QUARANTINED_ATTEMPTS
            for member in quarantine.members:
                member.attempts = quarantine.attempts
        quarantine.members += members
        if len(quarantine.members) >= full:
            quarantine.ready_at = -math.inf
        self._place(quarantine, members)

    def unknown(self, members: list[QueuedEntry], like: Group, size: Callable[[CallerKey], int]) -> None:
        """Put entries back into their callers' quarantines: nothing is known of them any more."""
        if not members:
            return
        callers = {caller_of(member.entry) for member in members}
        if len(callers) == 1:
            [caller] = callers
            self.join(caller, members, like, size(caller))
        else:
            self.add(Group(members, like.ready_at, QUARANTINE, like.failures, like.attempts))

    def halve(self, members: list[QueuedEntry], like: Group) -> None:
        """Search entries that hold a culprit: run one half, or the only entry."""
        rest, alone = None, like.alone
        if len(members) > 1:
            alone, (members, cut) = 0, _cut(members)
            rest = Group(members[cut:], math.inf, REST, like.failures, like.attempts, hung=like.hung)
            members = members[:cut]
            self.add(rest)
        half = Group(members, like.ready_at, HALF, like.failures, like.attempts, alone, rest=rest, hung=like.hung)
        half.avoid, half.avoid_until = like.avoid, like.avoid_until
        self.add(half)

    def let_go(self, rest: Group | None) -> list[QueuedEntry]:
        """Take the entries that waited for a half, which has ended."""
        if rest is None or rest not in self.groups:
            return []
        members, rest.members = rest.members, []
        for member in members:
            del self.of[member]
        del self.groups[rest]
        return members

    def take(self, group: Group, limit: int, weight: float = math.inf) -> list[QueuedEntry]:
        """Take members of a group for one run: all, unless the slot takes fewer, or less weight, or they are of several shapes."""
        members = group.members
        shape = members[0].entry.shape
        others = [member for member in members if member.entry.shape != shape]
        members = [member for member in members if member.entry.shape == shape] if others else members
        if weight < math.inf:
            weights = accumulate(member.weight for member in members)
            limit = min(limit, max(1, sum(together <= weight for together in weights)))
        taken, left = members[:limit], members[limit:] + others
        for member in taken:
            del self.of[member]
        if left and group.rest is not None and group.rest in self.groups:
            group.rest.members[:0] = left
            for member in left:
                self.of[member] = group.rest
            left = []
        group.members = left
        if not left:
            self._drop(group)
        elif group.kind == QUARANTINE:  # Others have their turn before what is left of it.
            del self.groups[group]
            self.groups[group] = None
        return taken

    def remove(self, queued: QueuedEntry, size: Callable[[CallerKey], int]) -> None:
        """Take one entry out for good."""
        group = self.of.pop(queued)
        group.members.remove(queued)
        if not group.members:
            self._drop(group)
            if group.rest is not None:  # The culprit may have left.
                self.unknown(self.let_go(group.rest), group, size)

    def overdue(self, now: float) -> list[QueuedEntry]:
        """Entries that have no time left."""
        if self.due > now:
            return []
        late = [member for member in self.of if last_moment(member) <= now]
        self.due = min((due for member in self.of if (due := last_moment(member)) > now), default=math.inf)
        return late

    def choose(self, worker: str, others: bool, now: float) -> Choice:
        """Choose the groups that a free worker may take."""
        choice = Choice()
        half = quarantine = None
        for group in self.groups:
            opens = group.open_at(worker, others)
            if opens > now:
                choice.again = min(choice.again, opens)
            elif group.kind == FIRST:
                choice.first = group
                return choice
            elif group.kind == HALF:
                half = half or group
            else:
                quarantine = quarantine or group
        choice.turn = quarantine if half is None or (quarantine is not None and self._lean > 0.0) else half
        return choice

    def wake(self, idle: Collection[str], others: bool, now: float) -> str | float:
        """Choose an idle worker that may take a group now; if there is none, the instant to look again."""
        again = math.inf
        for group in self.groups:
            for worker in islice(idle, 2):  # Only one can be the one to avoid.
                opens = group.open_at(worker, others)
                if opens <= now:
                    return worker
                again = min(again, opens)
        return again

    def earn(self, seconds: float, tenants: int, full: float) -> None:
        """Note that the tier queues went first for `seconds` of a GPU, while groups waited beside `tenants` tenants."""
        share = max(seconds, LEAST_COST) * self.callers / max(tenants, 1)
        self.credit = min(self.credit + share, MOST_CREDIT * max(full, LEAST_COST))

    def pay(self, group: Group, seconds: float, full: float, price: float) -> None:
        """Charge a group's turn of `seconds`, each of which costs `price` in credit."""
        cost = max(seconds, LEAST_COST)
        self.credit -= cost * price
        most = MOST_CREDIT * max(full, LEAST_COST)
        self._lean = max(-most, min(most, self._lean + (-cost if group.kind == QUARANTINE else cost * SEARCH_PRICE)))

    def overrun(self, seconds: float) -> None:
        """Charge for a turn that took so much longer than it was taken for."""
        self.credit -= max(seconds, 0.0) * APART_PRICE

    def _place(self, group: Group, members: Sequence[QueuedEntry]) -> None:
        for member in members:
            member.state = RETRYING
            member.attempts, member.hung = group.attempts, group.hung
            self.of[member] = group
            self.due = min(self.due, last_moment(member))

    def _drop(self, group: Group) -> None:
        del self.groups[group]
        if group.caller is not None:
            del self._quarantines[group.caller]


def last_moment(suspect: QueuedEntry) -> float:
    """Instant at which an entry that waits again is too late. An entry that never ran keeps its queue deadline."""
    return suspect.due if suspect.attempts else suspect.queue_due


def _cut(members: list[QueuedEntry]) -> tuple[list[QueuedEntry], int]:
    """Find the cut of a batch: between two callers while there are several, those with most entries first."""
    counts = Counter(caller_of(member.entry) for member in members)
    if len(counts) == 1:
        return members, len(members) // 2
    ranks = {caller: rank for rank, (caller, _) in enumerate(counts.most_common())}
    members = sorted(members, key=lambda member: ranks[caller_of(member.entry)])
    best, at = 0, 0
    for _, count in counts.most_common():
        at += count
        if at < len(members) and (best == 0 or abs(2 * at - len(members)) < abs(2 * best - len(members))):
            best = at
    return members, best
