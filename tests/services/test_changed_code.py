"""Code that changes while workers serve: what is told of each slot, and when, and who shares answers, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from headway.errors import BatchRaised, TargetError
from headway.model import ModelReport, Reply, Slot
from headway.worker.batcher import Batcher
from tests.services.batchers import make_batcher
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import Clock

LOADS = 2.0
"""Seconds that a start takes."""


class Changing(Stand):
    """Stand whose slots read from `code` what they run, and share answers to identical requests."""

    def __init__(self, clock: Clock, *backends: FakeBackend) -> None:
        self.code = "old"
        super().__init__(clock, *backends, cache=True, collapse=True, gpu_timeout_ms=30_000, request_timeout_ms=60_000)

    def _batcher(self, index: int) -> Batcher:
        async def read() -> ModelReport:
            return ModelReport("", self.code)

        backend = self.backends[index]
        backend.start_seconds = LOADS
        slot = Slot(f"gpu-{index}", "m", 8)
        return make_batcher(
            slot, lambda: backend, self.broker, self.counters.worker, self._clock, gpu_timeout=30.0, read_report=read
        )

    async def told(self) -> list[str]:
        return [one.runs.target for one in await self.broker.workers()]


def of(reply: Reply) -> tuple[str, bool]:
    """Code that has answered, and whether its output was kept."""
    assert reply.ran is not None
    return reply.ran.target, reply.kept


async def test_a_reload_tells_the_code_of_its_slots_when_all_have_it(clock: Clock) -> None:
    async with Changing(clock, FakeBackend(), FakeBackend()) as stand:
        assert of(await stand.ask("a")) == ("old", False)
        stand.code = "new"
        reloading = asyncio.ensure_future(stand.service.replace_workers())
        await asyncio.sleep(1.75 * LOADS)
        assert await stand.told() == ["old", "old"]
        assert of(await stand.ask("a")) == ("old", True)
        await reloading
        assert await stand.told() == ["new", "new"]
        assert of(await stand.ask("a")) == ("new", False)
        assert of(await stand.ask("a")) == ("new", True)


async def test_after_a_reload_nobody_joins_a_batch_that_began_before(clock: Clock) -> None:
    async with Changing(clock, FakeBackend(20.0), FakeBackend(20.0)) as stand:
        asked = [stand.asking(text, timeout=60.0) for text in "ab"]  # Both slots run one.
        await asyncio.sleep(0.1)
        stand.code = "new"
        await stand.service.replace_workers()
        later = [stand.asking(text, timeout=60.0) for text in "ab"]
        assert {of(reply) for reply in await asyncio.gather(*asked)} == {("old", False)}
        assert {of(reply) for reply in await asyncio.gather(*later)} == {("new", False)}


async def test_a_batch_that_raises_on_old_code_after_a_reload_bars_nothing(clock: Clock) -> None:
    def raises(entries: object) -> BatchRaised | None:
        return BatchRaised("mended by now") if stand.code == "old" else None

    async with Changing(clock, FakeBackend(5.0, raises)) as stand:
        asked = stand.asking("bad", timeout=60.0)
        await asyncio.sleep(6.0)  # It runs alone a second time.
        stand.code = "new"
        await stand.service.replace_workers()
        assert (await asked).failure is not None
        assert (await stand.ask("bad", timeout=60.0)).output == "BAD"


async def test_a_reload_that_fails_half_way_tells_what_each_slot_runs(clock: Clock) -> None:
    async with Changing(clock, FakeBackend(), FakeBackend()) as stand:
        stand.code, stand.backends[1].refuse_start = "new", 1
        with pytest.raises(TargetError):
            await stand.service.replace_workers()
        assert await stand.told() == ["new", "old"]


async def test_a_process_that_starts_anew_tells_the_code_that_it_has_loaded(clock: Clock) -> None:
    async with Changing(clock, backend := FakeBackend()) as stand:
        assert of(await stand.ask("a")) == ("old", False)
        stand.code = "new"
        backend.dead.set()
        await asyncio.sleep(LOADS + 1.0)
        assert await stand.told() == ["new"]
        assert of(await stand.ask("a")) == ("new", False)
