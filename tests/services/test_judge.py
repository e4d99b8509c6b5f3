import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from headway.core.input_policy import InputRule
from headway.errors import BackendError, BadOutput, BatchRaised, BatchTimeout, TargetError, WorkerAbsent, WorkerCrashed
from headway.gateway import judge as judging
from headway.gateway.judge import AT_ONCE, ROOM_OF_CALLER, SHARE, Judge, Question, Verdict
from headway.model import Entry, ItemResult, Value
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import FakeBackend
from tests.virtual_time import Clock

DEADLINE = 0.5
ANN, BOB = ("acme", "ann"), ("umbrella", "bob")
ANSWERS: dict[str, Value | None] = {"bad": b"false", "odd": "yes", "none": None}
FAULTS: dict[str, BackendError] = {
    "hang": BatchTimeout("late"),
    "crash": WorkerCrashed("died"),
    "raise": BatchRaised("ValueError"),
    "nonsense": BadOutput("no list"),
}


class FakeFunction(FakeBackend):
    """A function that refuses `bad` and fails on the inputs in FAULTS. `hang` takes until the deadline."""

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        if self.dead.is_set():
            raise WorkerAbsent("gone")
        texts = [str(entry.input) for entry in entries]
        self.batches.append(texts)
        for text in texts:
            if (fault := FAULTS.get(text)) is not None:
                await asyncio.sleep(timeout if text == "hang" else self.seconds)
                if not isinstance(fault, BatchRaised | BadOutput):
                    self.dead.set()
                raise fault
        await asyncio.sleep(self.seconds)
        return [ItemResult(ANSWERS.get(text, b"true")) for text in texts]


class Stand:
    """A judge that runs `functions`."""

    def __init__(self, clock: Clock, *functions: FakeFunction) -> None:
        self.clock, self.functions = clock, functions
        self.restarts: list[str] = []
        rule = InputRule(name="judge", function="a:b", deadline_ms=DEADLINE * 1000, processes=len(functions))
        self.judge = Judge(rule, functions.__getitem__, clock, lambda: 0.5, self.restarts.append)
        self.supervisor = Supervisor()

    async def start(self) -> None:
        await self.judge.open()
        for function in self.functions:
            function.batches.clear()
        self.judge.start(self.supervisor)

    def ask(
        self, *texts: str, caller: tuple[str, str] = ANN, wanted: Callable[[], bool] = lambda: True
    ) -> asyncio.Future[tuple[Verdict, int]] | None:
        told: asyncio.Future[tuple[Verdict, int]] = asyncio.get_running_loop().create_future()
        taken = self.judge.ask(Question(caller, texts, lambda *found: told.set_result(found), wanted))
        return told if taken else None

    async def verdicts(self, *texts: str) -> list[Verdict]:
        """Return the verdicts on separate questions that are asked at the same time."""
        asked = [self.ask(text) for text in texts]
        return [(await verdict)[0] for verdict in asked if verdict is not None]

    async def verdict(self, *texts: str, caller: tuple[str, str] = ANN) -> tuple[Verdict, int]:
        told = self.ask(*texts, caller=caller)
        assert told is not None
        return await told


@asynccontextmanager
async def judged(clock: Clock, processes: int = 1, seconds: float = 0.01) -> AsyncIterator[Stand]:
    stand = Stand(clock, *(FakeFunction(seconds) for _ in range(processes)))
    await stand.start()
    try:
        yield stand
    finally:
        await stand.supervisor.stop()
        await stand.judge.close()


@pytest.mark.parametrize(
    ("texts", "verdict"),
    [
        (["good"], (Verdict.LET_IN, 0)),
        (["bad"], (Verdict.REFUSED, 0)),
        (["good", "good", "bad", "good", "bad"], (Verdict.REFUSED, 2)),
        (["good"] * 100, (Verdict.LET_IN, 99)),
        (["odd"], (Verdict.FAILED, 0)),
        (["none"], (Verdict.FAILED, 0)),
        (["good", "odd"], (Verdict.FAILED, 1)),
    ],
)
async def test_the_first_refused_text_decides(texts: list[str], verdict: tuple[Verdict, int], clock: Clock) -> None:
    async with judged(clock) as stand:
        assert await stand.verdict(*texts) == verdict
        assert max(map(len, stand.functions[0].batches)) <= AT_ONCE


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_function_that_fails_gives_no_verdict_and_is_there_again_for_the_next(fault: str, clock: Clock) -> None:
    async with judged(clock) as stand:
        assert await stand.verdict(fault) == (Verdict.FAILED, 0)
        assert await stand.verdict("good", caller=BOB) == (Verdict.LET_IN, 0)
        assert stand.functions[0].starts == (2 if fault in ("hang", "crash") else 1)
        assert len(stand.restarts) == stand.functions[0].starts - 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_text_that_fails_spoils_no_other_of_its_call(fault: str, clock: Clock) -> None:
    async with judged(clock) as stand:
        assert await stand.verdicts("good", "bad", fault) == [Verdict.LET_IN, Verdict.REFUSED, Verdict.FAILED]
        assert stand.functions[0].batches[0] == ["good", "bad", fault]


async def test_a_process_that_dies_between_calls_is_replaced_before_the_next(clock: Clock) -> None:
    async with judged(clock) as stand:
        function = stand.functions[0]
        function.dead.set()
        await asyncio.sleep(0.1)
        assert function.starts == 2
        function.dead.set()
        assert await stand.verdict("good") == (Verdict.LET_IN, 0)
        assert stand.restarts == ["judge"] * 2


async def test_a_function_that_stays_down_is_retried_and_holds_nobody_up(clock: Clock) -> None:
    async with judged(clock) as stand:
        function = stand.functions[0]
        function.refuse_start = 8
        assert stand.ask("crash") is not None
        await asyncio.sleep(0.05)
        begun = stand.clock()
        assert await stand.verdict("good", caller=BOB) == (Verdict.BUSY, 0)
        assert stand.clock() - begun == pytest.approx(DEADLINE)
        await asyncio.sleep(60.0)
        assert await stand.verdict("good", caller=BOB) == (Verdict.LET_IN, 0)


async def test_a_caller_who_ends_a_process_waits_nine_times_as_long_and_others_do_not(clock: Clock) -> None:
    async with judged(clock) as stand:
        assert await stand.verdict("hang") == (Verdict.FAILED, 0)
        assert stand.ask("good") is None
        assert await stand.verdict("good", caller=BOB) == (Verdict.LET_IN, 0)
        await asyncio.sleep(SHARE * (DEADLINE + 0.02))
        assert await stand.verdict("good") == (Verdict.LET_IN, 0)


async def test_what_a_caller_has_asked_before_it_ended_a_process_gets_no_verdict_at_once(clock: Clock) -> None:
    async with judged(clock) as stand:
        begun = stand.clock()
        assert await stand.verdicts("hang", "good") == [Verdict.FAILED, Verdict.BUSY]
        assert stand.clock() - begun == pytest.approx(2 * DEADLINE, abs=0.05)


async def test_callers_take_turns_whatever_one_of_them_has_asked(clock: Clock) -> None:
    async with judged(clock) as stand:
        flood = [stand.ask("good") for _ in range(ROOM_OF_CALLER)]
        assert None not in flood
        assert stand.ask("good") is None
        other = stand.ask("good", caller=BOB)
        assert other is not None
        assert await other == (Verdict.LET_IN, 0)
        assert list(map(len, stand.functions[0].batches[:2])) == [AT_ONCE, 1]
        assert sum(told.done() for told in flood if told is not None) == AT_ONCE


async def test_the_room_is_bounded_in_texts_and_in_characters(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(judging, "ROOM_IN_CHARS", 1000)
    monkeypatch.setattr(judging, "ROOM", 50)
    async with judged(clock, seconds=0.0) as stand:
        assert stand.ask("a" * 900) is not None
        assert stand.ask("a" * 101, caller=BOB) is None
        assert stand.ask("a" * 100, caller=BOB) is not None
        await asyncio.sleep(1.0)
        assert stand.ask("a" * 2000) is not None  # A text that is larger than the room is judged alone.
        await asyncio.sleep(1.0)
        callers = [("t", str(number)) for number in range(50)]
        assert all(stand.ask("", caller=caller) is not None for caller in callers)
        assert stand.ask("", caller=BOB) is None
        await asyncio.sleep(1.0)


async def test_a_question_that_nobody_waits_for_is_not_put(clock: Clock) -> None:
    async with judged(clock) as stand:
        first = stand.ask("good")
        left = stand.ask("left", wanted=lambda: False)
        assert first is not None and left is not None
        assert await first == (Verdict.LET_IN, 0)
        await asyncio.sleep(1.0)
        assert stand.functions[0].batches == [["good"]]


async def test_several_processes_work_side_by_side(clock: Clock) -> None:
    async with judged(clock, processes=2) as stand:
        hung = stand.ask("hang")
        assert hung is not None
        await asyncio.sleep(0)
        assert await stand.verdict("good", caller=BOB) == (Verdict.LET_IN, 0)
        assert not hung.done()
        assert await hung == (Verdict.FAILED, 0)


async def test_a_judge_that_retires_answers_what_it_has_and_ends_its_processes(clock: Clock) -> None:
    async with judged(clock, processes=2) as stand:
        asked = [stand.ask("good") for _ in range(3 * AT_ONCE)]
        stand.judge.retire()
        assert [(await told)[0] for told in asked if told is not None] == [Verdict.LET_IN] * 3 * AT_ONCE
        await asyncio.sleep(0.1)
        assert stand.judge.over
        assert [function.stops for function in stand.functions] == [1, 1]


@pytest.mark.parametrize("text", ["odd", "none", "raise", "crash"])
async def test_an_answer_of_no_truth_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(judging, "WARM_UP", text)
    stand = Stand(clock, FakeFunction())
    with pytest.raises(TargetError, match=r"the function (fails|does not return a boolean)"):
        await stand.start()
    assert stand.functions[0].stops == 1
