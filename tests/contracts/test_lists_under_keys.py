"""Lists of inputs under one idempotency key at two gateways: the first wins as a whole, however its parts arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from headway import errors
from headway.config import Settings
from headway.gateway import fan_out
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import Gateway
from headway.model import InferenceRequest, ItemResult, Lease, Principal, Reply, RequestOptions, Value
from headway.runtime.counters import GatewayCounts
from headway.runtime.fair_turns import FairTurns
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from tests.contracts.brokers import AT_ONCE, Harness, failure_of, output, slot

ADA = Principal("ada", "acme", 1)


class Line(FairTurns):
    """A line whose turns the test gives."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.waiting: list[Callable[[], None]] = []

    def wait(self, tenant: str, begin: Callable[[], None]) -> None:
        self.waiting.append(begin)

    def give(self, most: int) -> None:
        """Give a turn to everyone waiting, but at most `most` turns."""
        for _ in range(most):
            if self.waiting:
                self.waiting.pop()()


class Door:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.line = gateway.turns = Line()

    def ask(self, inputs: Sequence[str], key: str = "k") -> asyncio.Future[Sequence[Reply]]:
        ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
        options = RequestOptions(100.0, 1, key)
        FanOut(self.gateway, InferenceRequest(ADA, new_id(), options, "m"), inputs, ended.set_result).start()
        return ended


@asynccontextmanager
async def doors(harness: Harness) -> AsyncIterator[tuple[Door, Door]]:
    supervisor, settings = Supervisor(), Settings(model="m", max_batch_size=8)
    made = [
        Gateway(settings, ["m"], broker, GatewayCounts(), harness.now) for broker in (harness.broker, harness.peer())
    ]
    for gateway in made:
        gateway.start(supervisor)
    try:
        await harness.settle()
        yield Door(made[0]), Door(made[1])
    finally:
        await supervisor.stop()


async def worked_off(
    harness: Harness, *lists: asyncio.Future[Sequence[Reply]], lines: Sequence[Line], fails: str = ""
) -> list[Value]:
    """Run what comes until the lists have ended. One input fails through no fault of its own. Returns what ran."""
    ran: list[Value] = []
    while not all(one.done() for one in lists):
        for line in lines:
            line.give(1)
        await harness.advance(0.01)
        lease = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(lease, Lease):
            inputs = [entry.input for entry in lease.entries]
            gone = ItemResult(None, "nobody is there", elsewhere=True)
            await harness.broker.complete(lease, [gone if one == fails else ItemResult(output(one)) for one in inputs])
            ran += inputs
    return ran


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "AT_ONCE", 4)
    monkeypatch.setattr(fan_out, "FEW", 2)


async def test_of_two_lists_under_a_key_one_is_answered_and_nothing_of_the_other_runs(harness: Harness) -> None:
    async with doors(harness) as (one, other):
        wanted, late = [f"a{number}" for number in range(8)], [f"b{number}" for number in range(8)]
        first = one.ask(wanted)
        one.line.give(1)
        await harness.settle()
        second = other.ask(late)
        other.line.give(8)  # As many as it may offer before the first list continues.
        await harness.settle()
        assert sorted(map(str, await worked_off(harness, first, second, lines=[one.line, other.line]))) == wanted
        assert [reply.output for reply in await first] == [output(text) for text in wanted]
        [refused] = await second
        failure = failure_of(refused)
        assert (failure.code, failure.message.startswith("input")) == (errors.IDEMPOTENCY_MISUSE, False)


async def test_a_list_that_comes_again_elsewhere_joins_its_first_and_later_gets_its_outputs(harness: Harness) -> None:
    async with doors(harness) as (one, other):
        wanted = [f"a{number}" for number in range(8)]
        both = [door.ask(wanted) for door in (one, other)]
        assert sorted(map(str, await worked_off(harness, *both, lines=[one.line, other.line]))) == wanted
        third = other.ask(wanted)
        assert await worked_off(harness, third, lines=[other.line]) == []
        for ended in (*both, third):
            assert [reply.output for reply in await ended] == [output(text) for text in wanted]


@pytest.mark.parametrize("again", ["a", "b"])
async def test_a_list_whose_first_input_failed_runs_only_that_when_it_comes_again_and_no_other(
    harness: Harness, again: str
) -> None:
    async with doors(harness) as (one, other):
        first = one.ask(["a0", "a1"])
        assert await worked_off(harness, first, lines=[one.line], fails="a0") == ["a0", "a1"]
        assert [failure_of(reply).code for reply in await first] == [errors.NO_WORKERS]
        second = other.ask([f"{again}0", f"{again}1"])
        ran = await worked_off(harness, second, lines=[other.line])
        if again == "a":
            assert ran == ["a0"]
            assert [reply.output for reply in await second] == [output("a0"), output("a1")]
        else:
            assert [failure_of(reply).code for reply in await second] == [errors.IDEMPOTENCY_MISUSE]
