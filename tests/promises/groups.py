"""Groups of requests that one run may answer."""

from __future__ import annotations

from tests.promises.operation import ASKS, History, Operation


class Groups:
    """Groups of requests that one run may answer: one id, one key, or identical requests where these are shared.

    Arguments:
        history: history of the requests.
        shares: whether identical requests may get one answer.
    """

    def __init__(self, history: History, *, shares: bool) -> None:
        self._parents: dict[object, object] = {}
        self._first: dict[object, float] = {}
        for one in history.operations:
            if one.kind not in ASKS:
                continue
            for place, text in enumerate(one.texts):
                names = [_name(one, place)]
                names += [("id", one.tenant, one.id)] if one.id and not place else []
                names += [("key", one.tenant, one.key, place)] if one.key else []
                names += [("same", one.tenant, text, one.wanted, one.model, one.parameters)] if shares else []
                for name in names:
                    self._join(names[0], name, one.called)

    def together(self, one: tuple[Operation, int], other: tuple[Operation, int]) -> bool:
        """Whether inputs of two requests may have one answer."""
        return self._root(_name(*one)) == self._root(_name(*other))

    def knows(self, one: Operation) -> bool:
        """Whether it is about something that somebody of its tenant asked."""
        return _name(one) in self._parents

    def first_call(self, one: Operation, place: int = 0) -> float:
        """Instant of the first request that may share this answer of `one`."""
        return self._first[self.of(one, place)]

    def of(self, one: Operation, place: int = 0) -> object:
        """Name of the group of an input of a request, or of a task that is asked for."""
        return self._root(_name(one, place))

    def _join(self, one: object, other: object, called: float) -> None:
        mine, yours = self._root(one), self._root(other)
        self._parents[yours] = mine
        self._first[mine] = min(called, self._first.get(mine, called), self._first.get(yours, called))

    def _root(self, name: object) -> object:
        parent = self._parents.setdefault(name, name)
        while parent != name:
            self._parents[name] = self._parents[parent]
            name, parent = parent, self._parents[parent]
        return name


def _name(one: Operation, place: int = 0) -> object:
    return ("one", one.number, place) if one.kind in ASKS else ("id", one.tenant, one.id)
