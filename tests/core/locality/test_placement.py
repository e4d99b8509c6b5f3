"""Placement of models on GPUs: what is loaded where, and what is unloaded to make room."""

import pytest

from headway.core.locality import (
    BUSY,
    COLD,
    FIRST_LOAD,
    LEAST_RESIDENCE,
    MIN_WARM,
    PAUSE,
    RESIDENCE_LOADS,
    Asked,
    Move,
    Placement,
)

LOAD = 10.0
RESIDENCE = RESIDENCE_LOADS * LOAD
ENTRY = 0.05


def asked(**rates: float) -> dict[str, Asked]:
    return {model: Asked(rate, 1 if rate else 0, 1, ENTRY) for model, rate in rates.items()}


def placed(gpus: int, room: int, *models: str, warm_at: float = 0.0, **min_warm: int) -> Placement:
    placement = Placement([f"g{number}" for number in range(gpus)], room, {m: min_warm.get(m, 0) for m in models})
    for move in placement.first():
        placement.loaded(move.gpu, move.model, LOAD, warm_at)
    return placement


def hot(load: float) -> Placement:
    """Return the placement of one GPU with room for one of two models. Only the hot one has had requests."""
    placement = Placement(["g0"], 1, {"hot": 0, "rare": 0})
    placement.loaded("g0", "hot", load, -1000.0)
    for look in range(200):
        assert placement.look(asked(hot=10.0), {}, look / 2 - 100.0) == []
    return placement


def on(placement: Placement, gpus: int) -> list[str]:
    return ["".join(sorted(placement.warm(f"g{number}"))) for number in range(gpus)]


def test_with_room_for_all_every_gpu_holds_every_model() -> None:
    assert on(placed(2, 2, "a", "b"), 2) == ["ab", "ab"]
    assert placed(2, 1, "a", "b", "c").look(asked(a=0.0, b=0.0, c=0.0), {}, 100.0) == [], "nobody asks"


def test_the_first_loads_spread_the_models_and_fill_the_room_after_what_is_to_be_kept() -> None:
    placement = Placement(["g0", "g1"], 2, {"a": 0, "b": 0, "c": 0})
    moves = placement.first()
    assert [(move.gpu, move.model) for move in moves] == [("g0", "a"), ("g1", "b"), ("g0", "c"), ("g1", "a")]
    assert {move.reason for move in moves} == {COLD}
    assert placement.copies("a") == 2
    placement = Placement(["g0", "g1"], 1, {"a": 0, "b": 2})
    assert [(move.model, move.reason) for move in placement.first()] == [("b", MIN_WARM)] * 2


def test_a_cold_model_takes_the_place_of_the_coldest() -> None:
    placement = placed(2, 1, "a", "b", "c")
    now = 0.0
    while now <= RESIDENCE:
        now += 0.5
        moves = placement.look(asked(a=5.0, b=0.0, c=1.0), {("g0", "a"): 0.25}, now)
        if moves:
            break
    assert moves == [Move("g1", "c", "b", COLD)]
    assert now >= RESIDENCE, "b stays for its least residence"


def test_a_gpu_that_is_lost_has_no_model_and_gets_none_any_more() -> None:
    placement = placed(2, 2, "a", "b", "c", warm_at=-1000.0)
    placement.lose("g0")
    assert placement.warm("g0") == set()
    assert {placement.share("g0", model) for model in "abc"} == {0.0}
    for look in range(400):
        for move in placement.look(asked(a=5.0, b=5.0, c=5.0), {}, look / 2):
            assert move.gpu == "g1"
            placement.loaded(move.gpu, move.model, LOAD, look / 2)
    assert placement.first() == []


def test_no_load_begins_here_while_another_process_loads_the_model_or_carries_it() -> None:
    placement = placed(1, 1, "a", "b")
    assert placement.look({"a": Asked(), "b": Asked(1.0, 1, 1, ENTRY, loads=True)}, {}, 1000.0) == []
    assert placement.look({"a": Asked(), "b": Asked(1.0, 1, 1, ENTRY, capacity=1.0)}, {}, 1000.5) == []
    assert [move.model for move in placement.look(asked(b=1.0), {}, 1001.0)] == ["b"]


def test_a_busy_model_gets_another_copy_once_waiting_costs_more_than_the_load() -> None:
    placement = placed(2, 2, "a", "b", "c", "d")
    now, begun = RESIDENCE, None
    while begun is None:
        now += 0.5
        moves = placement.look(asked(a=30.0, b=0.1, c=0.1, d=0.1), {}, now)
        begun = moves[0] if moves else None
        assert now < RESIDENCE + 60.0
    assert (begun.model, begun.reason, begun.gpu) == ("a", BUSY, "g1")
    assert now - RESIDENCE > 0.5, "not at the first look"


def test_a_backlog_counts_as_waiting() -> None:
    placement = placed(2, 1, "a", "b", warm_at=-1000.0)
    backlog = {"a": Asked(1.0, int(20 * LOAD / ENTRY), 1, ENTRY), "b": Asked()}
    placement.look(asked(a=5.0), {}, 0.0)
    placement.look(asked(a=5.0), {}, 60.0)
    assert [move.reason for move in placement.look(backlog, {}, 60.5)] == [BUSY]


def test_a_model_less_asked_for_waits_for_its_patience_and_no_longer() -> None:
    placement = placed(1, 1, "hot", "rare", warm_at=-1000.0)
    for look in range(200):
        placement.look(asked(hot=10.0, rare=0.0), {}, look / 2)
    begun = next(look / 2 for look in range(1000) if placement.look(asked(hot=10.0, rare=0.01), {}, 100.0 + look / 2))
    assert begun == pytest.approx(RESIDENCE + LOAD, abs=1.0)


def test_a_cold_model_waits_for_the_residence_of_an_idle_one_and_spares_the_hot_one() -> None:
    placement = Placement(["g0"], 2, {"hot": 0, "idle": 0, "rare": 0})
    for model, load in (("hot", 1.0), ("idle", 10.0)):
        placement.loaded("g0", model, load, 0.0)
    moves = (move for look in range(200) for move in placement.look(asked(hot=10.0, rare=0.01), {}, look / 2))
    assert next(moves) == Move("g0", "rare", "idle", COLD)


@pytest.mark.parametrize("load", [0.26, 2.0])
@pytest.mark.parametrize(("waits", "pauses"), [(2.0, 1.0), (0.5, 5.0), (1.0, 8.0)])
def test_a_client_that_comes_again_after_each_refusal_gets_its_model_within_the_patience_and_a_pause(
    load: float, waits: float, pauses: float
) -> None:
    placement = hot(load)
    patience, now, waited = LEAST_RESIDENCE + load, 0.0, 0.0
    while now < patience + pauses + 1.0:
        waiting = now % (waits + pauses) < waits
        waited = now if waiting else waited
        if moves := placement.look(asked(hot=10.0, rare=0.01 if waiting else 0.0), {}, now):
            break
        now += 0.5
    assert [(move.model, move.evicts) for move in moves] == [("rare", "hot")]
    assert now - waited <= load, "a load is for somebody who waits, or has just now"
    assert now >= patience - 0.5, "a hotter model stays until then"


def test_a_model_whose_only_client_has_gone_is_not_loaded() -> None:
    placement = hot(0.26)
    for look in range(200):
        assert placement.look(asked(hot=10.0, rare=0.01 if look < 4 else 0.0), {}, look / 2) == []


def test_a_model_that_does_not_load_rests_longer_each_time_and_leaves_its_place() -> None:
    placement = placed(1, 2, "a", "b", "c", warm_at=-1000.0)
    now, failed_at = 0.0, 0.0
    pauses: list[float] = []
    while len(pauses) < 4:
        now += 0.5
        if moves := placement.look(asked(c=1.0), {}, now):
            pauses.append(now - failed_at)
            placement.failed("g0", moves[0].model, now)
            failed_at = now
    assert pauses[1:] == [PAUSE, 2 * PAUSE, 4 * PAUSE]
    assert len(placement.warm("g0")) == 1, "one made room, and the place is still there"


def test_loads_are_expected_to_take_what_they_took() -> None:
    placement = Placement(["g0"], 2, {"a": 0, "b": 0})
    assert placement.load_seconds("a") == FIRST_LOAD
    placement.loaded("g0", "a", 2.0, 0.0)
    assert placement.load_seconds("a") == placement.load_seconds("b") == 2.0
    assert placement.residence("a") == LEAST_RESIDENCE


def test_the_share_of_a_gpu_is_what_others_leave_and_at_least_an_even_part() -> None:
    placement = placed(1, 3, "a", "b", "c")
    used = {("g0", "a"): 0.9, ("g0", "b"): 0.05}
    placement.look(asked(a=1.0, b=1.0, c=0.0), used, 1.0)
    assert placement.share("g0", "a") == pytest.approx(0.95)
    assert placement.share("g0", "b") == pytest.approx(0.5)
    assert placement.share("g0", "unknown") == 0.0


def test_a_move_that_another_process_was_faster_with_is_taken_back() -> None:
    placement = placed(2, 1, "a", "b", "c", warm_at=-1000.0)
    [move] = placement.look(asked(c=1.0), {}, 0.0)
    placement.undo(move)
    assert on(placement, 2) == ["a", "b"]
    assert placement.look(asked(c=1.0), {}, 0.5) == [move]


@pytest.fixture
def hung() -> Placement:
    """One GPU with room for one of two models. A load of one of them began at 0 s and hangs."""
    placement = Placement(["g0"], 1, {"hung": 0, "cold": 0})
    assert [move.model for move in placement.look(asked(hung=1.0), {}, 0.0)] == ["hung"]
    return placement


def test_an_overdue_load_makes_room_for_a_cold_model_that_is_asked_for(hung: Placement) -> None:
    assert hung.overdue_after("hung") == 3 * FIRST_LOAD
    assert hung.look(asked(hung=5.0), {}, 30.0) == [], "while nobody else is asked for it goes on"
    assert hung.look(asked(cold=1.0), {}, 30.5) == [Move("g0", "cold", "hung", COLD, gives_up=True)]


def test_a_load_that_was_given_up_has_twice_the_time_when_it_is_tried_again(hung: Placement) -> None:
    [move] = hung.look(asked(cold=1.0), {}, 30.5)
    hung.given_up(move.gpu, "hung", 30.5)
    assert hung.rest("hung", 30.5) == PAUSE
    assert hung.overdue_after("hung") == 6 * FIRST_LOAD
    hung.loaded("g0", "cold", 1.0, 31.0)
    assert hung.overdue_after("cold") == 30.0, "as for every load, however short they are"
    hung.loaded("g0", "hung", 1.0, 100.0)
    assert hung.overdue_after("hung") == 30.0, "it has been loaded since"


def test_an_overdue_load_keeps_its_gpus_other_loads_waiting_no_longer() -> None:
    placement = Placement(["g0"], 2, {"hung": 0, "cold": 0})
    placement.look(asked(hung=1.0), {}, 0.0)
    assert placement.look(asked(cold=1.0), {}, 29.5) == []
    assert placement.look(asked(cold=1.0), {}, 30.5) == [Move("g0", "cold", "", COLD)]


def test_a_busy_model_takes_no_place_of_an_overdue_load() -> None:
    placement = Placement(["g0", "g1"], 1, {"hung": 0, "busy": 0})
    placement.look(asked(hung=1.0), {}, 0.0)
    placement.loaded("g1", "busy", 0.1, 0.0)
    assert not any(placement.look(asked(busy=100.0), {}, look / 2) for look in range(400))


def test_a_move_that_gives_up_a_load_and_is_undone_leaves_that_load_as_it_was(hung: Placement) -> None:
    [move] = hung.look(asked(cold=1.0), {}, 30.5)
    hung.undo(move)
    assert hung.copies("hung") == 1
    assert hung.look(asked(cold=1.0), {}, 31.0) == [move]


def test_a_model_that_did_not_load_is_tried_on_another_gpu_where_there_is_room() -> None:
    placement = Placement(["g0", "g1"], 1, {"a": 0, "b": 0})
    tried, now = [], 0.0
    for _ in range(3):
        now += 100.0
        [move] = placement.look(asked(a=1.0), {}, now)
        placement.failed(move.gpu, "a", now)
        tried.append(move.gpu)
    assert tried == ["g0", "g1", "g0"]
