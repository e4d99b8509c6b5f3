"""Equal inputs in one request: the gateway submits each distinct input only once."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headway import errors
from headway.gateway.client_quotas import AnswerRoom, HeldBytes
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import AT_ONCE
from headway.gateway.pending import Ending, PendingRequest
from headway.model import DedupKind, Entry, Failure, Limit, Principal, Reply, RequestOptions
from tests.services.calls import failure_of, several
from tests.services.stand import Stand, served
from tests.virtual_time import Clock

ADA = Principal("ada", "acme", 1)
LIMITED = Principal("bob", "acme", 1, (Limit("key-1", "key", 6000.0, 2000.0),))
MANY = 5 * AT_ONCE
pytestmark = pytest.mark.stand(collapse=True)


def begun(
    stand: Stand, inputs: Sequence[str], caller: Principal = ADA, room: AnswerRoom | None = None, **options: Any
) -> tuple[FanOut, asyncio.Future[Sequence[Reply]]]:
    return several(stand.gateway, inputs, caller, RequestOptions(30.0, 1, **options), room=room)


class Endings:
    """An observer that records how many requests ended together, and how they ended."""

    def __init__(self, stand: Stand) -> None:
        self.turns: list[int] = []
        self.of: dict[Ending, int] = {}
        self.rows: list[PendingRequest] = []
        stand.gateway._observers = (*stand.gateway._observers, self)

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        if requests:
            self.turns.append(len(requests))
            self.rows += requests
            self.of[ending] = self.of.get(ending, 0) + len(requests)


@pytest.mark.parametrize("near", [True, False])
async def test_equal_inputs_run_once_as_one_entry(near: bool, monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    offered: list[str] = []
    offer = stand.gateway._session.offer

    def noted(entry: Entry) -> None:
        offered.append(str(entry.input))
        offer(entry)

    monkeypatch.setattr(stand.gateway._session, "offer", noted)
    if not near:
        stand.gateway._session.near = None
    endings = Endings(stand)
    replies = await begun(stand, ["a"] * MANY)[1]
    assert [reply.output for reply in replies] == ["A"] * MANY
    assert offered == stand.ran == ["a"]
    assert [reply.shared for reply in replies] == [None, *[DedupKind.SAME] * (MANY - 1)]
    assert stand.counters.gateway.shared == {("m", "same", "joined"): MANY - 1}
    assert stand.counters.gateway.requests["m", "paid", "ok"] == MANY
    assert endings.of == {Ending.REPLIED: MANY}
    assert max(endings.turns) == AT_ONCE, "no turn of the loop answers all of them"
    assert len({one.entry.id for one in endings.rows}) == MANY


async def test_the_rest_does_not_run_after_the_first_output(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    """A long list is submitted in slices, after its first input."""
    turns, wait = stand.gateway.turns, stand.gateway.turns.wait

    def late(tenant: str, begin: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(0.2, wait, tenant, begin)

    monkeypatch.setattr(turns, "wait", late)
    replies = await begun(stand, ["a"] * MANY)[1]
    assert [reply.output for reply in replies] == ["A"] * MANY
    assert stand.ran == ["a"]


@pytest.mark.parametrize(("settings", "options"), [({"collapse": False}, {}), ({"cache": True}, {"fresh": True})])
async def test_without_sharing_each_runs(settings: dict[str, object], options: dict[str, Any], clock: Clock) -> None:
    async with served(clock, **{"collapse": True, **settings}) as stand:
        await begun(stand, ["a"] * 20, **options)[1]
        assert stand.ran == ["a"] * 20


async def test_limits_are_charged_for_every_input(stand: Stand) -> None:
    await begun(stand, ["a"] * MANY, LIMITED)[1]
    assert stand.broker.rate_limit_debt(LIMITED.limits[0]) == pytest.approx(MANY / 100 - 0.1, abs=0.3)


@pytest.mark.parametrize("key", ["", "k"])
async def test_under_a_key_they_run_once_and_are_replayed(key: str, stand: Stand) -> None:
    for _ in range(2):
        replies = await begun(stand, ["a", "b", "a", "b", "a"] * 20, key=key)[1]
        assert [reply.output for reply in replies] == ["A", "B", "A", "B", "A"] * 20
    if key:
        assert {(reply.shared, reply.kept) for reply in replies} == {(DedupKind.KEY, True)}
    assert sorted(stand.ran) == (["a", "b"] if key else ["a", "a", "b", "b"])


async def test_the_failure_of_the_first_is_that_of_the_request_and_the_others_are_let_go_of(stand: Stand) -> None:
    endings = Endings(stand)
    _, ended = begun(stand, ["a"] * MANY)
    await asyncio.sleep(0.05)
    first = next(iter(stand.gateway.held.values()))
    stand.gateway._answer(first, Failure(errors.DEADLINE_EXCEEDED, "too late", None, "total"), Ending.TIMED_OUT)
    [reply] = await ended
    assert failure_of(reply).code == errors.DEADLINE_EXCEEDED
    await asyncio.sleep(1.0)
    assert endings.of == {Ending.TIMED_OUT: 1, Ending.LEFT: MANY - 1}


async def test_whoever_leaves_leaves_all_of_them(stand: Stand) -> None:
    whole, ended = begun(stand, ["a"] * MANY)
    await asyncio.sleep(0.05)
    whole.abandon()
    await asyncio.sleep(1.0)
    assert not ended.done()
    assert stand.gateway.pending == 0


async def test_outputs_that_are_too_large_together_end_the_request_and_no_turn_lets_go_of_all(stand: Stand) -> None:
    endings = Endings(stand)
    most = 100_000
    _, ended = begun(stand, ["a" * 1000] * MANY, room=AnswerRoom(HeldBytes(1 << 30), "acme", most))
    [reply] = await ended
    assert failure_of(reply).code == errors.PAYLOAD_TOO_LARGE
    assert stand.gateway.pending > 2 * AT_ONCE, "they are let go of in turns"
    await asyncio.sleep(1.0)
    assert stand.gateway.pending == 0
    assert sum(endings.of.values()) == MANY
    assert endings.of[Ending.LEFT] > MANY / 2


@pytest.mark.parametrize(("first", "again"), [(True, False), (False, True), (False, False)])
async def test_under_a_key_each_part_keeps_its_outcome(first: bool, again: bool, stand: Stand) -> None:
    _, ended = begun(stand, ["a", "b", "a"], key="k", fresh=first)
    await ended
    before = stand.ran
    _, ended = begun(stand, ["a", "b", "a"], key="k", fresh=again)
    assert [(reply.shared, reply.kept) for reply in await ended] == [(DedupKind.KEY, True)] * 3
    assert stand.ran == before
