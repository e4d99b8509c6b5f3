"""Decides whether the history of one object is allowed: just-in-time linearization, as in Lowe's checker and Knossos.

A configuration is the state of the object together with the progress of each running operation. The search keeps all
configurations that fit what was seen so far. A call adds an operation to each. Before a return, all effects that may
have happened by then are tried in every order. A return keeps the configurations in which its operation is done with
the answer it got. If none is left, nothing explains the history. An operation without a return runs forever: it may
take effect at any later time, or never.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from tests.promises.operation import Operation

CALLED, DONE = "called", "done"
"""An operation's progress at the start and at the end. The object names the steps between them."""
MOST = 500_000
"""Maximum number of configurations. With more, a history is too complex to judge."""

State = TypeVar("State", bound=Hashable)
Step = tuple[State, str]
"""The object's state, and the operation's progress."""


class Object(Protocol[State]):
    @property
    def initial(self) -> State: ...

    def steps(self, state: State, operation: Operation, progress: str) -> Iterable[Step[State]]:
        """Return the next steps of an operation, given its answer, or any possible answer if it has none."""
        ...

    def turns(self, state: State) -> Iterable[State]:
        """Return states that a state may change to without an operation."""
        ...


class TooComplex(Exception):
    """The history has too many explanations to check."""


class Search(Generic[State]):
    """Judges the history of one object, using all operations on it."""

    def __init__(self, subject: Object[State], operations: Sequence[Operation]) -> None:
        self._subject = subject
        self._operations = {operation.number: operation for operation in operations}

    def unexplained(self) -> Operation | None:
        """Return the first operation whose answer nothing explains, or None. Raises TooComplex."""
        events = [(one.called, 0, one) for one in self._operations.values()]
        events += [(one.ends, 1, one) for one in self._operations.values() if one.ends is not None]
        found: set[tuple[State, frozenset[tuple[int, str]]]] = {(self._subject.initial, frozenset())}
        for _, returns, operation in sorted(events, key=lambda event: event[:2]):
            if not returns:
                found = {(state, under_way | {(operation.number, CALLED)}) for state, under_way in found}
                continue
            done = (operation.number, DONE)
            found = {(state, under_way - {done}) for state, under_way in self._closed(found) if done in under_way}
            if not found:
                return operation
        return None

    def _closed(
        self, found: set[tuple[State, frozenset[tuple[int, str]]]]
    ) -> set[tuple[State, frozenset[tuple[int, str]]]]:
        """Return all states that may have been reached from these by now."""
        closed, open_ = set(found), list(found)
        while open_:
            state, under_way = open_.pop()
            more = [(turned, under_way) for turned in self._subject.turns(state)]
            for number, progress in under_way:
                operation = self._operations[number]
                rest = under_way - {(number, progress)}
                for next_state, next_progress in self._subject.steps(state, operation, progress):
                    over = next_progress == DONE and operation.ends is None
                    more.append((next_state, rest if over else rest | {(number, next_progress)}))
            for one in more:
                if one not in closed:
                    closed.add(one)
                    open_.append(one)
            if len(closed) > MOST:
                raise TooComplex
        return closed
