"""Groups requests that one run may answer: with the same id or key, or identical ones if the history `shares`."""

from tests.promises.operation import ASKS, History, Operation


class Groups:
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
        """Return True if one run may have answered these inputs of two requests."""
        return self._root(_name(*one)) == self._root(_name(*other))

    def knows(self, one: Operation) -> bool:
        return _name(one) in self._parents

    def first_call(self, one: Operation, place: int = 0) -> float:
        """Return the time of the first request that may share this answer of `one`."""
        return self._first[self.of(one, place)]

    def of(self, one: Operation, place: int = 0) -> object:
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
