"""Random outages: every request gets exactly one answer, its own, in time. A plan is a list of phases. Requests keep
arriving through two gateways, and two batchers serve them. After the last phase, the broker is healthy again.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway import errors
from headway.core.admission import AdmissionLimits
from headway.gateway.deadlines import DEADLINE_GRAIN
from tests.services.fake_backend import ANYBODY, FakeBackend
from tests.services.fleet import Asked, Fleet
from tests.services.troubled import MODES
from tests.virtual_time import Clock, run

IN_TROUBLE = {errors.SERVICE_OVERLOADED, errors.DEADLINE_EXCEEDED, errors.NO_WORKERS, errors.SHED}
"""Codes that a client may hear instead of an answer while the broker is in trouble."""
SETTLED = 3.0
"""Seconds after the trouble after which nobody may notice anything of it."""


@dataclass(frozen=True)
class Phase:
    """How calls end for `seconds`, and whether connections are cut or all data is lost at the start."""

    mode: str
    seconds: float
    cut: bool = False
    loss: bool = False


def phases(longest: float) -> st.SearchStrategy[Phase]:
    return st.builds(Phase, st.sampled_from([*MODES, "flaky"]), st.floats(0.01, longest), st.booleans(), st.booleans())


class Story:
    """Sends random requests during the phases."""

    def __init__(self, clock: Clock, fleet: Fleet, seed: int, timeout: float = 4.0) -> None:
        self.clock = clock
        self.fleet = fleet
        self.timeout = timeout
        self.rng = random.Random(seed)
        self.asked: list[Asked] = []
        self.left: list[Asked] = []
        self.heard = Counter[str]()

    async def tell(self, plan: list[Phase], after: float) -> None:
        clients = asyncio.ensure_future(self._ask_on())
        await asyncio.sleep(1.0)
        for phase in plan:
            await self._trouble(phase)
        await self.fleet.server.become("fine")
        self.fleet.server.script = lambda name: None
        self.over = self.clock()
        await asyncio.sleep(after)
        clients.cancel()
        await asyncio.sleep(self.timeout + 1.0)

    async def _trouble(self, phase: Phase) -> None:
        server = self.fleet.server
        if phase.loss:
            server.lose_everything()
        if phase.cut:
            server.cut()
        flaky = phase.mode == "flaky"
        await server.become("fine" if flaky else phase.mode)
        server.script = (lambda name: self.rng.choice(MODES[:3])) if flaky else (lambda name: None)
        await asyncio.sleep(phase.seconds)

    async def _ask_on(self) -> None:
        while True:
            number = len(self.asked)
            id = f"id-{number}"
            asked = self.fleet.ask(f"t{number}", id=id, gateway=number % len(self.fleet.gateways), timeout=self.timeout)
            self.asked.append(asked)
            if self.rng.random() < 0.05:
                await asyncio.sleep(self.rng.random() * 0.2)
                if not asked.replies:
                    self.fleet.gateways[number % len(self.fleet.gateways)].abandon(asked, ANYBODY.tenant, id)
                    self.left.append(asked)
            await asyncio.sleep(self.rng.expovariate(20.0))

    def check(self) -> Counter[str]:
        """Check that each request got its own answer, once and in time, and that nothing is left. Returns outcome counts."""
        heard: Counter[str] = Counter()
        for one in self.asked:
            if one in self.left:
                assert one.replies == []
                continue
            outcome = one.outcome
            assert outcome == "ok" or outcome in IN_TROUBLE
            assert one.answered_at - one.at <= self.timeout + DEADLINE_GRAIN + 0.002
            if one.at >= self.over + SETTLED:
                assert outcome == "ok", one.text
            heard[outcome] += 1
        assert all(gateway.pending == 0 for gateway in self.fleet.gateways)
        inner = self.fleet.server.inner
        assert inner._entries == {} or all(q.state == 3 for q in inner._entries.values())
        assert inner._running == {}
        return heard

    def runs(self) -> Counter[str]:
        return Counter(text for backend in self.fleet.backends for batch in backend.batches for text in batch)


def lived_through(
    plan: list[Phase], seed: int, after: float, fallback: FakeBackend | None = None, timeout: float = 4.0
) -> Story:
    """Run a plan to its end, and check it. `heard` counts the outcomes that clients got."""

    async def main(clock: Clock) -> Story:
        backends, gateways = (FakeBackend(0.03), FakeBackend(0.03)), 2 if fallback is None else 1
        async with Fleet(clock, *backends, gateways=gateways, fallback=fallback, seed=seed) as fleet:
            story = Story(clock, fleet, seed, timeout)
            await story.tell(plan, after)
            story.heard = story.check()
            return story

    return run(main)


EXPLORE = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Long plans cost about 50 ms each."""


@EXPLORE
@given(st.lists(phases(2.5), min_size=1, max_size=6), st.integers(0, 2**32))
def test_whatever_happens_every_request_gets_one_answer(plan: list[Phase], seed: int) -> None:
    story = lived_through(plan, seed, SETTLED + 1.0)
    assert max(story.runs().values()) <= 1 + story.fleet.server.losses


@EXPLORE
@given(st.lists(phases(0.2), min_size=1, max_size=4), st.integers(0, 2**32))
def test_an_outage_shorter_than_the_patience_of_the_door_costs_nobody_an_answer(plan: list[Phase], seed: int) -> None:
    assert lived_through(plan, seed, 0.0).heard.keys() == {"ok"}


@pytest.fixture
def open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit every entry. A batch whose end couldn't be reported for seconds makes the model look slow for a while."""
    monkeypatch.setattr(AdmissionLimits, "judge", lambda *_: None)


@EXPLORE
@given(st.lists(phases(2.5), min_size=1, max_size=4), st.integers(0, 2**32))
def test_with_a_fallback_every_request_is_answered(open_door: None, plan: list[Phase], seed: int) -> None:
    fallback = FakeBackend(0.03)
    assert lived_through(plan, seed, SETTLED + 1.0, fallback, timeout=12.0).heard.keys() == {"ok"}
    assert max(Counter(text for batch in fallback.batches for text in batch).values(), default=0) <= 1
