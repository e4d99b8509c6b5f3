"""Bulk lines before the input policy: as requests they are changed, refused, and judged by functions, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from headway.bulk.seat_runner import JUDGED_AT_ONCE
from headway.core.input_policy import InputRule
from headway.gateway.input_gate import InputGate, InputPolicy
from headway.gateway.judge import Judge, Question, Verdict
from headway.model.bulk import BulkLine
from headway.runtime.counters import Counters
from tests.bulk.test_seat_runner import Play
from tests.services.test_judge import FakeFunction
from tests.virtual_time import run

PATTERN = InputRule(name="secrets", patterns=("secret",))


class Judged:
    """Lines before a policy with patterns and a function."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.function = FakeFunction(seconds=0.05)
        rule = InputRule(name="judge", function="a:b", deadline_ms=500.0)
        self.judge = Judge(rule, lambda number: self.function, clock, lambda: 0.5, lambda name: None)
        self.counters = Counters()
        policy = InputPolicy(
            [PATTERN, rule], {"secrets": lambda text: "secret" in text}, {"judge": self.judge}, ["free"], ["m"]
        )
        self.play = Play(clock, gate=InputGate(policy, self.counters.input_policy))

    def code(self, number: int) -> str:
        failure = self.play.ended["job", number].failure
        return failure.code if failure is not None else ""


def judged(script: Callable[[Judged], Awaitable[None]]) -> None:
    async def main(clock: Callable[[], float]) -> None:
        one = Judged(clock)
        await one.judge.open()
        one.function.batches.clear()
        one.judge.start(one.play.supervisor)
        one.play.runner.start(one.play.supervisor)
        one.play.supervisor.start("beats", one.play.keep_alive)
        one.play.worker("gpu-0")
        try:
            await script(one)
        finally:
            await one.play.runner.close()
            await one.play.supervisor.stop()

    run(main)


def _tell(told: asyncio.Queue[Verdict], verdict: Verdict, position: int) -> None:
    told.put_nowait(verdict)


def test_lines_are_refused_by_patterns_and_by_functions() -> None:
    async def script(one: Judged) -> None:
        await one.play.feed(["good", "a secret", "bad", "raise", *["good"] * 60])
        await one.play.until(64)
        assert one.play.failed() == {2, 3, 4}
        assert {one.code(number) for number in (2, 3, 4)} == {"REJECTED_BY_POLICY"}
        assert one.counters.input_policy["judge", "refused"] == 1
        assert max(map(len, one.function.batches)) <= JUDGED_AT_ONCE

    judged(script)


def test_parameters_of_lines_are_screened_too() -> None:
    async def script(one: Judged) -> None:
        line = BulkLine("job", "t", 1, "m", "", "good", b'{"suffix":"a secret"}')
        one.play.runner.offer([line], one.play.done)
        await one.play.until(1)
        assert one.code(1) == "REJECTED_BY_POLICY"

    judged(script)


def test_a_request_waits_for_one_call_with_lines_at_most() -> None:
    async def script(one: Judged) -> None:
        feeding = asyncio.ensure_future(one.play.feed(["good"] * 500))
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        for _ in range(20):
            began, told = loop.time(), asyncio.Queue[Verdict]()
            question = Question(("other", "ann"), ["asked"], partial(_tell, told), lambda: True)
            assert one.judge.ask(question)
            assert await told.get() is Verdict.LET_IN
            assert loop.time() - began <= 2 * one.function.seconds + 0.001
        await one.play.until(500)
        await feeding

    judged(script)


def test_a_line_that_no_function_has_time_for_is_judged_later() -> None:
    async def script(one: Judged) -> None:
        one.function.seconds = 0.45
        asked = [Question((f"other-{at}", "ann"), ["asked"], lambda *found: None, lambda: True) for at in range(20)]
        for question in asked:
            assert one.judge.ask(question)
        await one.play.feed(["good"] * 20)
        one.function.seconds = 0.05
        await one.play.until(20)
        assert not one.play.failed()

    judged(script)


def test_what_is_withdrawn_is_not_judged() -> None:
    async def script(one: Judged) -> None:
        await one.play.feed(["good"] * 30)
        one.play.runner.withdraw("job")
        await one.play.feed(["good"] * 5, "later")
        await one.play.until(5, "later")
        assert not any(job == "job" for job, _ in one.play.ended)
        assert await one.play.runner.room("m") > 0

    judged(script)
