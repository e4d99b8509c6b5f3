"""FairOrder of the models on one GPU: fair between them, and the more urgent first where they are even."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headway.core.locality.turns import LEAD, Contender, FairOrder, contender
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Entry


def run(turns: FairOrder, *models: str, seconds: float = 0.1) -> None:
    for model in models:
        turns.began(model)
        turns.ended(model, seconds)


def waiting(*models: str, slack: float = 2.0, seconds: float = 0.1) -> list[Contender]:
    return [Contender(model, slack, seconds) for model in models]


def test_nobody_who_waits_is_nobody_in_order() -> None:
    assert FairOrder().order([]) == []


def test_a_model_that_comes_during_a_flood_runs_next() -> None:
    turns = FairOrder()
    run(turns, *"aaaa")
    turns.began("a")
    turns.ended("a", 0.1)
    assert turns.order([Contender("a", 0.01, 0.1), Contender("b", 2.0, 0.1)]) == ["b", "a"]


def test_models_that_always_wait_take_turns() -> None:
    turns, ran = FairOrder(), []
    for _ in range(6):
        chosen = turns.order(waiting("a", "b"))[0]
        run(turns, chosen)
        ran.append(chosen)
    assert (ran.count("a"), ran.count("b")) == (3, 3)


def test_the_more_urgent_of_even_models_goes_first_by_its_own_run_time() -> None:
    short, long = Contender("short", 0.5, 0.1), Contender("long", 0.8, 0.4)
    assert FairOrder().order([short, long]) == ["long", "short"]
    assert FairOrder().order([Contender("a", 0.5), Contender("b", 0.4)]) == ["b", "a"], "without run times by slack"


def test_urgency_overrules_no_lead_in_time() -> None:
    turns = FairOrder()
    turns.began("late")
    turns.ended("late", 0.1 * LEAD * 1.01)
    assert turns.order([Contender("late", 0.0, 0.1), Contender("early", 9.0, 0.1)]) == ["early", "late"]


def test_time_in_which_nobody_asked_is_not_saved_up() -> None:
    turns = FairOrder()
    run(turns, *"a" * 50)
    ran = []
    for _ in range(4):
        chosen = turns.order(waiting("a", "b"))[0]
        run(turns, chosen)
        ran.append(chosen)
    assert ran.count("b") <= 3


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
def test_nobody_waits_longer_than_a_few_batches_of_each_other_model(
    models: list[tuple[float, float]], data: st.DataObject
) -> None:
    """While a model waits, each other one gets at most its batch, the lead, and one batch more."""
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
