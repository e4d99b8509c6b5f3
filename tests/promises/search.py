"""Whether a history of one object is allowed: just-in-time linearisation, as Lowe's and Knossos' checkers do it.

A configuration is the state of the object together with how far each operation under way has come. The search keeps all
configurations that fit what was seen so far. A call adds an operation to each; before a return every effect that may have
come by then is tried, in every order; a return keeps those in which that operation is done with the answer it got. When
none is left, the history has no explanation. An operation without a return stays under way for ever: it may have its
effect at any later time, or never.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from tests.promises.operation import Operation

CALLED, DONE = "called", "done"
"""Progress of an operation at first and in the end; the object names what is between."""
MOST = 500_000
"""Configurations beyond which a history is too complex to be judged."""

State = TypeVar("State", bound=Hashable)
Step = tuple[State, str]
"""State of the object, and how far the operation has come."""


class Object(Protocol[State]):
    """Object that operations act on."""

    @property
    def initial(self) -> State: ...

    def steps(self, state: State, operation: Operation, progress: str) -> Iterable[Step[State]]:
        """Next steps of an operation, given the answer that it got, or any that it may have got."""
        ...

    def turns(self, state: State) -> Iterable[State]:
        """States into which a state may turn by itself."""
        ...


class TooComplex(Exception):
    """The history has more explanations than can be looked at."""


class Search(Generic[State]):
    """Judges the history of one object by all operations on it."""

    def __init__(self, subject: Object[State], operations: Sequence[Operation]) -> None:
        self._subject = subject
        self._operations = {operation.number: operation for operation in operations}

    def unexplained(self) -> Operation | None:
        """The first operation whose answer nothing explains, if any. Raises TooComplex where that cannot be told."""
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
        """States that may have come of these by now."""
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
