"""Sharing of GPUs by several models: turns stay fair through floods, failed or hanging loads, and deaths."""

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.core.locality import LEAD, LONGEST_PAUSE, Asked, Contender, FairOrder, Move, Placement, contender
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Entry

LOAD = 4.0
BATCH, MOST = 0.1, 8
"""Seconds of a batch, and most entries of it."""
LOOK = 0.5
FLOOD = 400.0
"""Entries per second of a model that is flooded: five GPUs could not do them."""
QUEUE = 2000


class SharedGpuLaws(RuleBasedStateMachine):
    """Simulates GPUs with models, batch by batch. Loads take time, fail or hang, and warm processes die."""

    @initialize(gpus=st.integers(1, 3), room=st.integers(1, 3), models=st.integers(2, 5), kept=st.booleans())
    def begin(self, gpus: int, room: int, models: int, kept: bool) -> None:
        self.now = 0.0
        self.names = [f"m{number}" for number in range(models)]
        self.room = min(room, models)
        kept = kept and gpus * self.room > 1
        self.min_warm = {name: int(kept and number == 0) for number, name in enumerate(self.names)}
        self.gpus = [f"g{number}" for number in range(gpus)]
        self.placement = Placement(self.gpus, self.room, self.min_warm)
        self.turns = {gpu: FairOrder() for gpu in self.gpus}
        self.loading: dict[tuple[str, str], float] = {}
        self.warm = dict[tuple[str, str], float]()
        self.rates = dict.fromkeys(self.names, 0.0)
        self.waiting = dict.fromkeys(self.names, 0.0)
        self.came = dict.fromkeys(self.names, 0.0)
        self.broken, self.hangs = set[str](), set[str]()
        self.loads = Counter[str]()
        self.troubles = 0
        self.failed_at: dict[str, list[float]] = {name: [] for name in self.names}
        self.served_at = dict.fromkeys(self.names, 0.0)
        for move in self.placement.first():
            self.placement.loaded(move.gpu, move.model, LOAD, 0.0)
            self.warm[move.gpu, move.model] = 0.0

    @rule(model=st.integers(0, 4), rate=st.sampled_from((0.0, 1.0, 40.0, FLOOD)))
    def ask(self, model: int, rate: float) -> None:
        name = self.names[model % len(self.names)]
        self.rates[name] = rate
        self.served_at[name] = self.now

    @rule(model=st.integers(0, 4), how=st.sampled_from(("broken", "hangs", "well")))
    def change(self, model: int, how: str) -> None:
        """Make the loads of a model fail or hang from now on, or succeed again."""
        name = self.names[model % len(self.names)]
        self.broken.discard(name)
        if how == "broken":
            self.broken.add(name)
        elif how == "hangs":
            self.hangs.add(name)
        else:
            self.hangs.discard(name)
        self.troubles += 1

    @precondition(lambda self: self.warm)
    @rule(place=st.integers(0, 8))
    def die(self, place: int) -> None:
        """Kill a warm process, which doesn't come back."""
        gpu, model = sorted(self.warm)[place % len(self.warm)]
        self._leave(gpu, model)
        self.placement.failed(gpu, model, self.now)
        self.troubles += 1

    @rule(seconds=st.sampled_from((0.5, 5.0, 40.0)))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self._step()

    def _step(self) -> None:
        """Simulate the time between two looks."""
        self.now += LOOK
        for name, rate in self.rates.items():
            self.waiting[name] = min(self.waiting[name] + rate * LOOK, QUEUE)
        for (gpu, model), since in list(self.loading.items()):
            if model in self.broken:
                del self.loading[gpu, model]
                self._fail(gpu, model)
            elif model not in self.hangs and self.now >= since + LOAD:
                del self.loading[gpu, model]
                self.placement.loaded(gpu, model, LOAD, self.now)
                self.warm[gpu, model] = self.now
                self.failed_at[model].clear()
        had = {place: self._run(place) for place in self.gpus}
        used = {(gpu, model): share / LOOK for gpu, models in had.items() for model, share in models.items()}
        asked = {name: Asked(self.rates[name], int(self.waiting[name]), MOST, BATCH / MOST) for name in self.names}
        for move in self.placement.look(asked, used, self.now):
            self._move(move)

    def _fail(self, gpu: str, model: str) -> None:
        self.placement.failed(gpu, model, self.now)
        before = self.failed_at[model]
        if before:
            pause = min(2.0 ** (len(before) - 1), LONGEST_PAUSE)
            assert self.now - before[-1] >= pause, "what fails is tried again after pauses that double"
        before.append(self.now)

    def _run(self, gpu: str) -> dict[str, float]:
        """Run batches on a GPU until the next look. Returns the seconds that each model got."""
        had: dict[str, float] = dict.fromkeys((model for place, model in self.warm if place == gpu), 0.0)
        for _ in range(int(LOOK / BATCH)):
            order = self.turns[gpu].order([Contender(one, 1.0, BATCH, self.waiting[one] >= 1.0) for one in had])
            if not order or self.waiting[order[0]] < 1.0:
                break
            model = order[0]
            self.waiting[model] = max(self.waiting[model] - MOST, 0.0)
            self.turns[gpu].began(model)
            self.turns[gpu].ended(model, BATCH)
            had[model] += BATCH
            self.served_at[model] = self.now
        waits = [model for model in had if self.waiting[model] >= 1.0]
        if len(waits) > 1:
            part = int(LOOK / BATCH) // len(had)
            assert all(had[model] >= (part - 1) * BATCH - 1e-9 for model in waits), "a flood takes what is another's"
        return had

    def _move(self, move: Move) -> None:
        assert move.model not in {model for _, model in self.loading if (move.gpu, model) != (move.gpu, move.evicts)}
        if move.gives_up:
            since = self.loading.pop((move.gpu, move.evicts))
            assert self.now - since >= 30.0, "no load is given up before it is overdue"
            self.placement.given_up(move.gpu, move.evicts, self.now)
        elif move.evicts:
            stayed = self.now - self.warm[move.gpu, move.evicts]
            assert stayed >= self.placement.residence(move.evicts), "nobody leaves within its residence"
            self._leave(move.gpu, move.evicts)
            left = sum(model == move.evicts for _, model in self.warm)
            assert left >= self.min_warm[move.evicts], "what is to be kept is kept"
        self.loading[move.gpu, move.model] = self.now
        self.loads[move.model] += 1

    def _leave(self, gpu: str, model: str) -> None:
        del self.warm[gpu, model]
        self.turns[gpu].forget(model)

    @invariant()
    def no_gpu_holds_more_than_there_is_room_for(self) -> None:
        for gpu in getattr(self, "gpus", ()):
            held = [model for place, model in (*self.warm, *self.loading) if place == gpu]
            assert len(held) == len(set(held)) <= self.room
            assert set(self.placement.warm(gpu)) == {model for place, model in self.warm if place == gpu}

    @invariant()
    def loads_are_no_storm(self) -> None:
        """Each place gets at most one load per residence, plus the retries of failed loads, whose pauses double."""
        if not hasattr(self, "loads"):
            return
        tries = len(self.names) * (2 + math.log2(LONGEST_PAUSE) + self.now / LONGEST_PAUSE)
        stays = len(self.gpus) * self.room * (1 + self.now / self.placement.residence(self.names[0]))
        assert self.loads.total() <= tries * (1 + self.troubles) + stays

    def teardown(self) -> None:
        """Once all loads succeed again, every model with requests is served within a bounded time."""
        if not hasattr(self, "names"):
            return
        self.broken.clear()
        self.hangs.clear()
        begun, rest = self.now, max(self.placement.rest(name, self.now) for name in self.names)
        until = begun + rest + len(self.names) * (2 * self.placement.residence(self.names[0]) + 3 * LOAD) + 30.0
        while self.now < until:
            self._step()
            self.no_gpu_holds_more_than_there_is_room_for()
        starved = [name for name, rate in self.rates.items() if rate and self.served_at[name] <= begun]
        assert not starved, starved


TestSharedGpuLaws = SharedGpuLaws.TestCase
TestSharedGpuLaws.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


def run(turns: FairOrder, *models: str, seconds: float = 0.1) -> None:
    for model in models:
        turns.began(model)
        turns.ended(model, seconds)


def test_a_model_that_comes_during_a_flood_runs_next() -> None:
    turns = FairOrder()
    run(turns, *"aaaaa")
    assert turns.order([Contender("a", 0.01, 0.1), Contender("b", 2.0, 0.1)]) == ["b", "a"]


def test_the_more_urgent_of_even_models_goes_first_by_its_own_run_time() -> None:
    short, long = Contender("short", 0.5, 0.1), Contender("long", 0.8, 0.4)
    assert FairOrder().order([short, long]) == ["long", "short"]
    assert FairOrder().order([Contender("a", 0.5), Contender("b", 0.4)]) == ["b", "a"], "without run times by slack"


def test_urgency_overrules_no_lead_in_time() -> None:
    turns = FairOrder()
    run(turns, "late", seconds=0.1 * LEAD * 1.01)
    assert turns.order([Contender("late", 0.0, 0.1), Contender("early", 9.0, 0.1)]) == ["early", "late"]


def test_a_model_that_left_the_gpu_is_forgotten() -> None:
    turns = FairOrder()
    run(turns, "a", "b", "b")
    turns.forget("b")
    turns.forget("never there")
    assert turns.order([Contender("a", 2.0, 0.1), Contender("b", 1.0, 0.1)]) == ["b", "a"]


def test_a_contender_is_what_its_queue_says() -> None:
    queue = ModelQueue(QueueLimits(tiers=1, max_batch=8))
    queue.service.warm_up([(1, 0.1), (8, 0.2)])
    queue.set_slots(1)
    for number in range(9):
        queue.offer(Entry(str(number), "m", "", 0, "t", "g", 2.0, 4.0), 10.0)
    found = contender("m", queue, 10.5)
    assert (found.model, round(found.slack, 6), round(found.seconds, 6)) == ("m", 1.5, 0.2)


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 3.0)), min_size=2, max_size=6), st.data())
def test_nobody_waits_long_for_batches_of_other_models(models: list[tuple[float, float]], data: st.DataObject) -> None:
    """While a model waits, each other model gets at most one batch, its lead, and one more batch."""
    turns = FairOrder()
    for _ in range(data.draw(st.integers(0, 20))):
        number = data.draw(st.integers(0, len(models) - 1))
        run(turns, str(number), seconds=models[number][0])
    waited = 0.0
    while True:
        order = turns.order([Contender(str(n), slack, seconds) for n, (seconds, slack) in enumerate(models)])
        if order[0] == "0":
            break
        seconds = models[int(order[0])][0]
        run(turns, order[0], seconds=seconds)
        waited += seconds
        longest = max(seconds for seconds, _ in models)
        assert waited <= len(models) * (2 + LEAD) * longest + sum(s for s, _ in models)


def test_a_model_for_which_nothing_waits_is_asked_last_whatever_it_has_had() -> None:
    turns = FairOrder()
    run(turns, "a", "a")
    idle = Contender("idle", math.inf, 0.1, waits=False)
    assert turns.order([Contender("a", 1.0, 0.1), idle]) == ["a", "idle"]
    assert turns.order([idle]) == ["idle"]
