"""Promises of all dead letters: bounded, newest first."""

import pytest

from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.model import DeadLetter, Entry
from tests.contracts.brokers import MODELS, TRACE, Harness, failed


def letter(id: str, size: int = 10, model: str = "m", died_at: float = 0.0, tenant: str = "t") -> DeadLetter:
    entry = Entry(id, model, "x" * size, 0, tenant, "g", 1.0, 1.0, b'{"temperature":0.5}')
    return DeadLetter(entry=entry, error="bad", cause="raised", attempts=3, worker="gpu-0", died_at=died_at)


async def test_letters_are_kept_as_they_are_newest_first(harness: Harness) -> None:
    assert (list(await harness.dead.list()), await harness.dead.count()) == ([], 0)
    letters = [letter(f"id-{number}", model=MODELS[number % 2], died_at=1000.0 + number) for number in range(5)]
    for one in letters:
        await harness.dead.add(one)
    listed = [one.without_input() for one in letters]
    assert list(await harness.dead.list()) == listed[::-1]
    assert list(await harness.dead.list(2)) == listed[:2:-1]
    assert await harness.dead.count() == 5
    for tenant in (None, "t"):
        assert list(await harness.dead.find("id-3", tenant)) == [letters[3]]
        assert list(await harness.dead.find("unknown", tenant)) == []
    assert list(await harness.dead.find("id-3", "another")) == []


async def test_a_listing_has_all_of_a_letter_but_its_input(harness: Harness) -> None:
    """Large inputs would slow the listing down, and one tenant's could hide everybody else's from operators."""
    entry = Entry(
        "a",
        "m",
        "i" * 300_000,
        2,
        "täß",
        "g",
        60.0,
        120.0,
        parameters=b'{"p":1}',
        nonce=1 << 40,
        caller="c" * 300,
        trace=TRACE,
    )
    await harness.broker.enqueue([entry])
    for _ in range(2):
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
    [listed] = await harness.dead.list()
    assert (listed.entry.input, listed.entry.parameters) == ("", b"")
    [letter] = await harness.dead.find("a", "täß")
    assert letter.entry == entry
    assert listed == letter.without_input()


async def test_letters_of_two_tenants_with_one_id_are_two(harness: Harness) -> None:
    letters = {tenant: letter("a", tenant=tenant, died_at=at) for at, tenant in enumerate(("t", "u", "v"))}
    for one in letters.values():
        await harness.dead.add(one)
    await harness.dead.add(letter("ba"))
    assert await harness.dead.count() == 4
    for tenant, one in letters.items():
        assert list(await harness.dead.find("a", tenant)) == [one]
    assert {one.entry.tenant for one in await harness.dead.find("a")} == set(letters)
    assert await harness.dead.remove("a", "u") == 1
    assert await harness.dead.remove("a", "u") == 0
    assert {one.entry.tenant for one in await harness.dead.find("a")} == {"t", "v"}
    assert await harness.dead.remove("a") == 2
    assert [one.entry.id for one in await harness.dead.list()] == ["ba"]


async def test_a_tenants_letters_cost_another_none_of_its(harness: Harness) -> None:
    await harness.dead.add(letter("mine", tenant="calm", died_at=1.0))
    for number in range(17):
        await harness.dead.add(letter(f"flood {number}", 4_000_000, tenant="worst", died_at=2.0 + number))
    assert await harness.dead.count() < 18
    there = [one.entry.id for one in await harness.dead.list()]
    assert "flood 16" in there
    assert "flood 0" not in there
    assert await harness.dead.remove("mine", "calm") == 1


@pytest.mark.parametrize("model", MODELS)
async def test_an_entry_that_died_again_in_any_queue_is_listed_once_by_its_last_death(
    harness: Harness, model: str
) -> None:
    first, last = letter("a", died_at=1000.0), letter("a", model=model, died_at=2000.0)
    await harness.dead.add(first)
    await harness.dead.add(letter("b", died_at=1500.0))
    await harness.dead.add(last)
    assert [(one.entry.id, one.died_at) for one in await harness.dead.list()] == [("a", 2000.0), ("b", 1500.0)]
    assert list(await harness.dead.find("a")) == [last]


async def test_letters_are_counted_by_model_and_those_that_were_removed_or_replaced_in_the_totals(
    harness: Harness,
) -> None:
    assert not any((await harness.dead.totals()).values())
    for id, model in (("a", "m"), ("a", "m"), ("b", "m"), ("c", "other")):
        await harness.dead.add(letter(id, model=model))
    assert await harness.dead.remove("b") == 1
    assert await harness.dead.remove("b") == await harness.dead.remove("unknown") == 0
    counts, totals = await harness.dead.counts(), await harness.dead.totals()
    assert {model: number for model, number in counts.items() if number} == {"m": 1, "other": 1}
    assert {model: number for model, number in totals.items() if number} == {"m": 3, "other": 1}


@pytest.mark.parametrize("bound", [{"capacity": 4}, {"capacity_bytes": 20_000}])
async def test_who_has_most_letters_loses_its_oldest_and_one_that_comes_again_is_kept_once(
    bound: dict[str, int],
) -> None:
    box = DeadLetterBox(**bound)
    for _ in range(9):
        await box.add(letter("mine", 1_000, tenant="calm"))
    for number in range(9):
        await box.add(letter(f"flood {number}", 1_000, tenant="worst"))
    there = [one.entry.id for one in await box.list()]
    assert there[0] == "flood 8" and there[-1] == "mine"
    assert 3 <= len(there) <= 5
    assert await box.remove("mine") == 1
    await box.add(letter("other", 1_000))
    assert [one.entry.id for one in await box.list()][:2] == ["other", "flood 8"]
