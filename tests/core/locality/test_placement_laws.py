"""Laws of the placement, whatever is asked and whatever fails."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.locality.placement import Asked, Placement

ENTRY = 0.05


class Fleet:
    """GPUs on which loads take as long as drawn, and sometimes fail."""

    def __init__(self, gpus: int, room: int, min_warm: dict[str, int], load: float) -> None:
        self.room, self.min_warm, self.load = room, min_warm, load
        self.gpus = [f"g{number}" for number in range(gpus)]
        self.placement = Placement(self.gpus, room, min_warm)
        self.under_way: dict[tuple[str, str], float] = {}
        self.since: dict[tuple[str, str], float] = {}
        self.asked_since: dict[str, float] = {}
        for move in self.placement.first():
            self.under_way[move.gpu, move.model] = load

    def step(self, asked: dict[str, Asked], fails: bool, now: float) -> None:
        for (gpu, model), ends in list(self.under_way.items()):
            if ends <= now:
                del self.under_way[gpu, model]
                if fails:
                    self.placement.failed(gpu, model, now)
                else:
                    self.placement.loaded(gpu, model, self.load, now)
                    self.since[gpu, model] = now
        before = {model: len(self.homes(model)) for model in self.min_warm}
        for move in self.placement.look(asked, {}, now):
            assert move.model not in {model for _, model in self.under_way}, "one load of a model at a time"
            assert (move.gpu, move.model) not in self.since
            if move.evicts:
                stayed = now - self.since.pop((move.gpu, move.evicts))
                assert stayed >= self.placement.residence(move.evicts), "no eviction within the residence"
                before[move.evicts] -= 1
                assert before[move.evicts] >= self.min_warm[move.evicts], "min_warm is kept"
            self.under_way[move.gpu, move.model] = now + self.load
        for gpu in self.gpus:
            held = sum(place == gpu for place, _ in (*self.since, *self.under_way))
            assert held <= self.room, "never more than there is room for"
            assert set(self.placement.warm(gpu)) == {model for place, model in self.since if place == gpu}

    def homes(self, model: str) -> list[str]:
        return [gpu for gpu, other in self.since if other == model]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from((0.5, 4.0, 30.0)),
    st.integers(0, 2),
    st.data(),
)
def test_room_residence_min_warm_and_one_load_at_a_time(
    gpus: int, room: int, models: int, load: float, kept: int, data: st.DataObject
) -> None:
    names = [f"m{number}" for number in range(models)]
    least = {name: 1 if number < min(kept, gpus * room - 1) else 0 for number, name in enumerate(names)}
    fleet, now = Fleet(gpus, min(room, models), least, load), 0.0
    asks = st.builds(Asked, st.floats(0, 60), st.integers(0, 500), st.integers(1, 32), st.sampled_from((0.0, ENTRY)))
    for _ in range(data.draw(st.integers(1, 8))):
        asked = {name: data.draw(asks) for name in names}
        fails = data.draw(st.booleans())
        for _ in range(data.draw(st.sampled_from((1, 20, 80)))):
            now += load / 4
            fleet.step(asked, fails, now)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(2, 6), st.data())
def test_every_model_that_is_asked_for_is_warm_within_a_bounded_time(
    gpus: int, room: int, models: int, data: st.DataObject
) -> None:
    load = 10.0
    names = [f"m{number}" for number in range(models)]
    fleet = Fleet(gpus, min(room, models), dict.fromkeys(names, 0), load)
    asked = {name: Asked(data.draw(st.floats(0.01, 40.0)), 5, 1, ENTRY) for name in names}
    unseen = dict.fromkeys(names, 0.0)
    bound, now = models * (2 * fleet.placement.residence("m0") + 3 * load), 0.0
    while now < 3 * bound:
        now += load / 4
        fleet.step(asked, fails=False, now=now)
        for name in names:
            if fleet.homes(name):
                unseen[name] = now
            assert now - unseen[name] <= bound, f"{name} is cold for too long"
