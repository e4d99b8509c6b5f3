"""Lines of batches: whatever a line contains or leads to, it gets a record."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bulk.folder import BulkFolder
from headway.bulk.lines import AskedLine, LineSplitter, NotYet, pages
from headway.bulk.seat_runner import JUDGED_AT_ONCE
from headway.config import Settings
from headway.core.input_policy import InputRule
from headway.core.json_pages import finish
from headway.errors import CANCELLED
from headway.gateway.input_gate import InputGate, InputPolicy
from headway.gateway.judge import Judge, Question, Verdict
from headway.gateway.served_models import ServedModels
from headway.http.openai.bulk_lines import OpenAILines
from headway.model import Failure, Reply
from headway.model.bulk import BulkJob, BulkLine
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id
from tests.bulk.test_seat_runner import Play
from tests.scenes import Played
from tests.services.test_judge import FakeFunction
from tests.virtual_time import run

JOB = BulkJob(
    id="batch_1",
    tenant="acme",
    user="ann",
    endpoint="/v1/completions",
    input_file="file-1",
    created_at=0.0,
    expires_at=1.0,
)
GOOD = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "default", "prompt": "a"}}


def lines(*models: str) -> OpenAILines:
    return OpenAILines(Settings(), ServedModels(models or ("default",)), new_id)


def told(record: bytes) -> dict[str, Any]:
    assert b"\n" not in record
    found: dict[str, Any] = json.loads(record)
    return found


def asked(form: OpenAILines, **change: Any) -> AskedLine:
    found = finish(form.read(JOB, 3, json.dumps({**GOOD, **change}).encode()))
    assert isinstance(found, AskedLine), found
    return found


def made(line: AskedLine, *replies: Reply) -> tuple[bool, bytes]:
    *_, found = [line.take(at, reply) for at, reply in enumerate(replies)]
    assert found is not None
    *_, record = found
    assert record is not None
    return record


@given(text=st.binary(max_size=60) | st.recursive(st.none() | st.text(), lambda of: st.dictionaries(st.sampled_from([*GOOD, "x"]), of)).map(lambda one: json.dumps(one).encode()))  # fmt: skip
def test_any_line_that_is_no_request_has_its_record(text: bytes) -> None:
    found = finish(lines().read(JOB, 3, text))
    assert isinstance(found, bytes)
    record = told(found)
    assert (record["line"], record["error"]) == (3, None)
    assert 400 <= record["response"]["status_code"] < 500 and record["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("code", ["BACKEND_ERROR", "REJECTED_BY_MODEL", CANCELLED, "of the future"])
def test_any_failure_has_its_record(code: str) -> None:
    answered, record = made(asked(lines()), Reply("id", "acme", None, Failure(code, "lone \ud800")))
    assert not answered and told(record)["response"]["status_code"] >= 400 and told(record)["custom_id"] == "1"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("output", ["lone \ud800", b'{\n "text": "b"\n}', b'{"text": 3}'])
def test_any_output_has_its_record(output: Any, prompt: Any) -> None:
    line = asked(lines(), body={"model": "default", "prompt": prompt})
    answered, record = made(line, *([Reply("id", "acme", output)] * len(line.parts)))
    assert (told(record)["response"]["status_code"] == 200) is answered


def test_a_fault_at_a_line_has_its_record() -> None:
    answered, record = made(asked(lines()), Reply("id", "acme", 3))  # type: ignore[arg-type]
    assert not answered and told(record)["response"]["status_code"] == 500


def test_choices_of_several_prompts_are_parts_in_the_order_of_the_route() -> None:
    line = asked(lines(), body={"model": "default", "prompt": ["a", "b"], "n": 2, "top_k": 3})
    assert [(part.part, part.input, part.parameters) for part in line.parts] == [
        (at, input, b'{"top_k":3}') for at, input in enumerate("aabb")
    ]
    answered, record = made(line, *(Reply("id", "acme", f"{part.input!s}{part.part}") for part in line.parts))
    choices = told(record)["response"]["body"]["choices"]
    assert answered and [(one["index"], one["text"]) for one in choices] == [(0, "a0"), (1, "a1"), (2, "b2"), (3, "b3")]


def test_a_failed_part_fails_its_line_with_the_errors_of_its_route() -> None:
    line = asked(lines(), body={"model": "default", "prompt": ["a", "b"]})
    assert line.take(0, Reply("id", "acme", "a")) is None
    making = line.take(1, Reply("id", "acme", None, Failure("REJECTED_BY_MODEL", "no")))
    assert making is not None and line.take(1, Reply("id", "acme", "b")) is None
    body = told(next(making)[1])["response"]["body"]  # type: ignore[index]
    assert body["error"]["message"].startswith("input 1 of 2, counted from 0: no")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": ["a"] * 2_049}, 413),
        ({"prompt": ["a"] * 2_000, "n": 2}, 413),
        ({"prompt": "a" * 900_000, "n": 100}, 413),
        ({"prompt": [], "n": 2}, 400),
        ({"prompt": "a", "n": 0}, 400),
    ],
)
def test_a_line_has_as_many_parts_at_most_as_a_request(body: dict[str, Any], status: int) -> None:
    found = finish(lines().read(JOB, 3, json.dumps({**GOOD, "body": {"model": "default", **body}}).encode()))
    assert isinstance(found, bytes) and told(found)["response"]["status_code"] == status


def test_a_large_answer_is_made_bit_by_bit() -> None:
    line = asked(lines(), body={"model": "default", "prompt": ["a"] * 1_000})
    making = line.record([Reply("id", "acme", "x" * 5_000)] * 1_000)
    *steps, last = making
    assert len(steps) > 20 and last is not None
    assert len(told(last[1])["response"]["body"]["choices"]) == 1_000


def test_a_line_is_not_judged_while_no_model_is_known() -> None:
    form = OpenAILines(Settings(), ServedModels(()), new_id)
    with pytest.raises(NotYet):
        finish(form.read(JOB, 3, json.dumps(GOOD).encode()))


def test_a_line_for_a_model_that_the_credential_may_not_ask_is_refused() -> None:
    form = lines("default", "secret")
    mine = BulkJob(**{**{name: getattr(JOB, name) for name in JOB.__struct_fields__}, "models": ("default",)})
    body = {"model": "secret", "prompt": "a"}
    found = finish(form.read(mine, 3, json.dumps({**GOOD, "body": body}).encode()))
    assert isinstance(found, bytes) and told(found)["response"]["status_code"] == 404


@given(pieces=st.lists(st.text("ab\n", max_size=9).map(str.encode)), most=st.integers(1, 8))
def test_pieces_of_a_file_are_split_into_lines_of_a_bounded_length(pieces: list[bytes], most: int) -> None:
    splitter = LineSplitter(most)
    found = [line for piece in pieces for line in splitter.feed(piece)]
    assert [*found, splitter.end()] == [line[: most + 1] for line in b"".join(pieces).split(b"\n")]


def test_a_file_of_utf_16_is_refused_by_name_and_a_line_that_begins_with_a_zero_octet_too() -> None:
    for text in (json.dumps(GOOD) + "\n" + json.dumps(GOOD)).encode("utf-16").split(b"\n"):
        record = finish(lines().read(JOB, 1, text))
        assert isinstance(record, bytes)
        assert "UTF-16" in told(record)["response"]["body"]["error"]["message"]
    record = finish(lines().read(JOB, 1, b"\0" + json.dumps(GOOD).encode()))
    assert isinstance(record, bytes)
    assert "starts with a zero byte" in told(record)["response"]["body"]["error"]["message"]


async def test_a_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    folder = BulkFolder(str(tmp_path))
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfabcd\n\xef\xbb\xbf")
    found = [one for page in [page async for page in pages(folder, "marked", 4)] for one in page]
    assert found == [(1, b"abcd"), (2, b"\xef\xbb\xbf")]


PATTERN = InputRule(name="secrets", patterns=("secret",))


class Judged:
    """Lines that pass through a policy with patterns and a function."""

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


@pytest.fixture
def one() -> Played:
    return Played(judged)


def _tell(told: asyncio.Queue[Verdict], verdict: Verdict, position: int) -> None:
    told.put_nowait(verdict)


async def test_lines_are_refused_by_patterns_and_by_functions(one: Judged) -> None:
    await one.play.feed(["good", "a secret", "bad", "raise", *["good"] * 60])
    await one.play.until(64)
    assert one.play.failed() == {2, 3, 4}
    assert {one.code(number) for number in (2, 3, 4)} == {"REJECTED_BY_POLICY"}
    assert one.counters.input_policy["judge", "refused"] == 1
    assert max(map(len, one.function.batches)) <= JUDGED_AT_ONCE


async def test_parameters_of_lines_are_screened_too(one: Judged) -> None:
    line = BulkLine("job", "t", 1, "m", "", "good", b'{"suffix":"a secret"}')
    one.play.runner.offer([line], one.play.done)
    await one.play.until(1)
    assert one.code(1) == "REJECTED_BY_POLICY"


async def test_a_request_waits_for_one_call_with_lines_at_most(one: Judged) -> None:
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


async def test_a_line_that_no_function_has_time_for_is_judged_later(one: Judged) -> None:
    one.function.seconds = 0.45
    asked = [Question((f"other-{at}", "ann"), ["asked"], lambda *found: None, lambda: True) for at in range(20)]
    for question in asked:
        assert one.judge.ask(question)
    await one.play.feed(["good"] * 20)
    one.function.seconds = 0.05
    await one.play.until(20)
    assert not one.play.failed()


async def test_what_is_withdrawn_is_not_judged(one: Judged) -> None:
    await one.play.feed(["good"] * 30)
    one.play.runner.withdraw("job")
    await one.play.feed(["good"] * 5, "later")
    await one.play.until(5, "later")
    assert not any(job == "job" for job, _ in one.play.ended)
    assert await one.play.runner.room("m") > 0
