"""Rows of the ledger for requests that were taken in and have no outcome yet, between a real gateway and a worker."""

import asyncio
from typing import Any, Self

from headway.gateway.ledger_writer import INTERVAL, OPEN_AT_ONCE, LedgerWriter
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.storage.fake_ledger import FakeLedger
from tests.virtual_time import Clock, run

AT = 1_790_000_000.0


class Scene:
    """A service whose requests are recorded; batches take 1 s each."""

    def __init__(self, clock: Clock, **settings: Any) -> None:
        patient: dict[str, Any] = {"ledger_rows": "all", "request_timeout_ms": 60_000.0, "queue_timeout_ms": 60_000.0}
        self.stand = Stand(clock, FakeBackend(1.0), max_batch=1, **patient | settings)
        self.ledger, self.supervisor = FakeLedger(), Supervisor()
        self.writer = LedgerWriter(
            self.ledger,
            self.stand.settings,
            self.stand.counters.store,
            clock,
            lambda: AT + clock(),
            rng=lambda: 0.5,
            held=self.stand.gateway.held,
        )
        self.stand.gateway._observers = (*self.stand.gateway._observers, self.writer)

    async def __aenter__(self) -> Self:
        await self.writer.open()
        self.writer.start(self.supervisor)
        await self.stand.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stand.service.stop()
        await self.supervisor.stop()
        await self.writer.close()


async def test_a_request_has_a_row_while_it_waits_and_its_outcome_in_place_of_that(clock: Clock) -> None:
    async with Scene(clock) as scene:
        begun = clock()
        asked = [scene.stand.asking(text, timeout=30.0) for text in "ab"]
        await asyncio.sleep(2 * INTERVAL)
        assert [one.status for one in scene.ledger.waiting.values()] == ["queued", "queued"]
        for one in scene.ledger.waiting.values():
            assert abs(one.created_at - (AT + begun)) < 0.01
            assert abs(one.completed_at - (AT + begun + 30.0)) < 0.01
            assert (one.tenant, one.user, one.model, one.tier) == ("default", "anonymous", "m", "paid")
        await asked[0]
        await asyncio.sleep(2 * INTERVAL)
        assert len(scene.ledger.waiting) == 1
        await asked[1]
        await asyncio.sleep(2 * INTERVAL)
        assert scene.ledger.waiting == {}
        assert [one.status for one in scene.ledger.records] == ["completed", "completed"]
        assert scene.ledger.noted == 2


def test_what_ends_before_the_next_bulk_costs_one_row_and_by_default_nothing_else_is_written() -> None:
    for settings, noted in (({}, 0), ({"ledger_rows": "ended"}, 0)):

        async def main(clock: Clock, settings: dict[str, Any] = settings, noted: int = noted) -> None:
            async with Scene(clock, **settings) as scene:
                scene.stand.backends[0].seconds = 0.01
                for number in range(30):
                    await scene.stand.ask(str(number))
                if settings:
                    scene.stand.backends[0].seconds = 2.0
                    await scene.stand.ask("slow")
                await asyncio.sleep(2 * INTERVAL)
                assert len(scene.ledger.records) >= 30
                assert scene.ledger.noted <= noted + (0 if settings else 2)

        run(main)


async def test_while_the_ledger_is_away_answers_go_on_and_only_what_still_waits_is_noted_later(clock: Clock) -> None:
    async with Scene(clock) as scene:
        scene.ledger.away = True
        asked = [scene.stand.asking(str(number), timeout=30.0) for number in range(6)]
        assert (await asked[0]).output == "0"
        assert (await asked[3]).output == "3"
        scene.ledger.away = False
        await asyncio.sleep(1.5)
        assert scene.ledger.noted < 6, "what has ended meanwhile is noted no more"
        await asyncio.gather(*asked)
        await asyncio.sleep(3.0)
        assert scene.ledger.waiting == {}
        assert len(scene.ledger.records) == 6


async def test_more_requests_than_one_call_takes_are_all_noted_and_all_forgotten(clock: Clock) -> None:
    async with Scene(clock, max_queue=100_000) as scene:
        count = 2 * OPEN_AT_ONCE + 7
        asked = [scene.stand.asking(str(number), timeout=60.0) for number in range(count)]
        await asyncio.sleep(4 * INTERVAL + 0.1)
        held = scene.stand.gateway.pending
        assert held > OPEN_AT_ONCE
        assert len(scene.ledger.waiting) >= held - 1
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(8 * INTERVAL)
        assert scene.ledger.waiting == {}
