"""The input policy in front of a real gateway, broker and worker."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headway import errors
from headway.core.input_policy import InputRule
from headway.gateway.fan_out import AT_ONCE
from headway.gateway.input_gate import InputPolicy
from headway.gateway.judge import Judge
from headway.gateway.pending import FutureSink
from headway.model import EntryState, Failure, Limit, Principal, Reply, Value, ValueKind, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters
from tests.contracts.brokers import tensors
from tests.services.calls import failure_of, several
from tests.services.fake_backend import ANYBODY
from tests.services.requests import request
from tests.services.stand import Stand, codes, served
from tests.services.test_judge import FakeFunction
from tests.virtual_time import Clock

WORDS = InputRule(name="words", patterns=("evil",))
UNSEEN = InputRule(name="unseen", characters=("zero-width",))
JUDGED = InputRule(name="judged", function="a:b", deadline_ms=500.0)
LIMITED = Principal("ann", "acme", 1, (Limit("key-1", "key", 60.0, 4.0),))
LIMITED_MUCH = Principal("ann", "acme", 1, (Limit("key-1", "key", 6000.0, 1000.0),))
TIERS = ("enterprise", "paid", "free")


class Functions:
    def __init__(self, clock: Clock, seconds: float = 0.01) -> None:
        self.by_rule: dict[str, FakeFunction] = {}
        self._clock, self._seconds = clock, seconds

    def policy(self, *rules: InputRule) -> Callable[[Counters], InputPolicy]:
        """Return a factory for a policy with these rules. Patterns are plain words."""

        def make(counters: Counters) -> InputPolicy:
            searches = {
                rule.name: (lambda text, rule=rule: rule.patterns[0] in text) for rule in rules if rule.patterns
            }
            judges = {rule.name: self._judge(rule) for rule in rules if rule.function}
            return InputPolicy(rules, searches, judges, TIERS, ["m"])

        return make

    async def start(self, stand: Stand) -> None:
        assert stand.gate is not None
        for judge in stand.gate._policy.judges:
            await judge.open()
            judge.start(stand.service._supervisor)
        for function in self.by_rule.values():
            function.batches.clear()

    def _judge(self, rule: InputRule) -> Judge:
        function = self.by_rule[rule.name] = FakeFunction(self._seconds)
        return Judge(rule, lambda number: function, self._clock, lambda: 0.5, lambda name: None)


@asynccontextmanager
async def policed(
    clock: Clock, *rules: InputRule, seconds: float = 0.01, **settings: object
) -> AsyncIterator[tuple[Stand, Functions]]:
    functions = Functions(clock, seconds)
    async with served(clock, input_policy=functions.policy(*rules), **settings) as stand:
        await functions.start(stand)
        yield stand, functions


async def failure(stand: Stand, text: str, **how: Any) -> Failure:
    return failure_of(await stand.ask(text, **how))


async def ask_many(stand: Stand, inputs: Sequence[Value], caller: Principal = ANYBODY, **how: Any) -> Sequence[Reply]:
    return await several(stand.gateway, inputs, caller, **how)[1]


def counts(stand: Stand) -> dict[tuple[str, str], int]:
    return dict(stand.counters.input_policy)


async def test_an_input_is_refused_by_the_name_of_its_rule_and_never_by_its_pattern(clock: Clock) -> None:
    async with policed(clock, WORDS, UNSEEN) as (stand, _):
        refused = await failure(stand, "an evil\u200b one")
        assert (refused.code, refused.reason, refused.retry_after) == (errors.REJECTED_BY_POLICY, "policy", None)
        assert refused.message == "the input policy refuses this input: rule 'words'"
        assert (await stand.ask("a good\u200b one")).output == "A GOOD ONE"
        assert stand.ran == ["a good one"]
        assert counts(stand) == {("words", "refused"): 1, ("unseen", "changed"): 2}
        assert stand.counters.gateway.requests["m", "paid", "rejected_by_policy"] == 1
        assert stand.counters.gateway.refusals["policy", "paid", "m"] == 1


async def test_who_asks_for_another_model_learns_nothing_of_the_policy_and_leaves_nothing(clock: Clock) -> None:
    async with policed(clock, WORDS) as (stand, _):
        other = Principal("ann", "acme", 1, models=frozenset(("other",)))
        assert (await failure(stand, "evil", caller=other)).code == errors.FORBIDDEN
        assert stand.gate is not None
        plans = stand.gate._policy._plans
        before = dict(plans)
        for number in range(10):
            assert codes([await stand.gateway.ask(request("evil", model=f"m{number}"))]) == [errors.NOT_FOUND]
        assert (plans, counts(stand)) == (before, {})


@pytest.mark.parametrize(
    ("input", "parameters"),
    [(b'["a", {"b": "\\u0065vil"}]', b""), ("good", b'{"system": "\\u0065vil"}'), ("good", b'{"evil": 1}')],
)
async def test_no_part_of_a_request_is_left_out(input: Value, parameters: bytes, clock: Clock) -> None:
    async with policed(clock, WORDS) as (stand, _):
        assert codes([await stand.ask(input, parameters=parameters)]) == [errors.REJECTED_BY_POLICY]
        assert stand.ran == []


async def test_octets_are_looked_at_where_they_are_text(clock: Clock) -> None:
    def octets(content: bytes) -> str:
        return base64.b64encode(content).decode()

    async with policed(clock, WORDS, UNSEEN) as (stand, _):
        worker = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, takes=ValueKind.BYTES.value)
        stand.gateway.served.learn([worker])
        assert codes([await stand.ask(octets(b"an evil one"))]) == [errors.REJECTED_BY_POLICY]
        assert codes([await stand.ask(octets(b"\xff evil"))]) == ["ok"]
        assert codes([await stand.ask(octets("ok\u200b".encode()))]) == ["ok"]
        assert codes([await stand.ask("no base64")]) == [errors.BAD_REQUEST]
        assert stand.ran == [octets(b"\xff evil"), octets(b"ok")]


@pytest.mark.parametrize(("rule", "bad"), [(WORDS, "an evil one"), (JUDGED, "bad")], ids=["words", "judged"])
async def test_no_input_of_a_request_runs_before_all_are_let_in(rule: InputRule, bad: str, clock: Clock) -> None:
    async with policed(clock, rule, UNSEEN) as (stand, _):
        inputs = ["good\u200b"] * (2 * AT_ONCE)
        [reply] = await ask_many(stand, [*inputs, bad], LIMITED_MUCH)
        where = f"input {len(inputs)} of {len(inputs) + 1}, counted from 0: "
        assert failure_of(reply).message == f"{where}the input policy refuses this input: rule '{rule.name}'"
        assert stand.ran == []
        assert counts(stand) == {(rule.name, "refused"): 1, ("unseen", "changed"): 1}
        assert stand.gateway.limiter.owed_by(stand.broker)(LIMITED_MUCH.limits[0]) == pytest.approx(0.01, abs=0.002)
        assert stand.counters.gateway.requests["m", "paid", "rejected_by_policy"] == 1
        replies = await ask_many(stand, inputs)
        assert [one.output for one in replies] == ["GOOD"] * len(inputs)
        assert counts(stand)["unseen", "changed"] == 2


async def test_what_is_refused_or_waits_for_a_verdict_counts_towards_the_limit(clock: Clock) -> None:
    async with policed(clock, WORDS) as (stand, _):
        found = [await failure(stand, "evil", caller=LIMITED) for _ in range(6)]
        assert [one.code for one in found] == [errors.REJECTED_BY_POLICY] * 4 + [errors.RATE_LIMITED] * 2
        assert counts(stand) == {("words", "refused"): 4}
    async with policed(clock, JUDGED) as (stand, _):
        found = await asyncio.gather(*(failure(stand, "bad", caller=LIMITED) for _ in range(9)))
        assert [one.code for one in found] == [errors.REJECTED_BY_POLICY] * 4 + [errors.RATE_LIMITED] * 5


async def test_what_is_let_in_by_a_verdict_is_charged_once(clock: Clock) -> None:
    async with policed(clock, JUDGED) as (stand, _):
        for text in ("a", "b"):
            assert (await stand.ask(text, caller=LIMITED)).output == text.upper()
        assert [one.output for one in await ask_many(stand, ["c", "d"], LIMITED)] == ["C", "D"]
        assert not any(stand.gateway.limiter._debt(limit) for limit in LIMITED.limits)
        assert (await failure(stand, "e", caller=LIMITED)).code == errors.RATE_LIMITED


async def test_rules_are_for_tiers_and_models(clock: Clock) -> None:
    free = InputRule(name="free", patterns=("evil",), tiers=("free",))
    async with policed(clock, free, InputRule(name="other", patterns=("evil",), models=("other",))) as (stand, _):
        replies = [await stand.ask("evil", tier=tier) for tier in range(3)]
        assert codes(replies) == ["ok", "ok", errors.REJECTED_BY_POLICY]


async def test_requests_that_are_alike_once_they_are_normalised_have_one_answer(clock: Clock) -> None:
    async with policed(clock, UNSEEN, InputRule(name="form", normalise="NFKC"), cache=True) as (stand, _):
        replies = [await stand.ask(text) for text in ("a\ufb01", "afi", "af\u200bi")]
        assert [one.output for one in replies] == ["AFI"] * 3
        assert [one.kept for one in replies] == [False, True, True]
        keyed = [await ask_many(stand, inputs, key="k") for inputs in (["x\ufb01", "y"], ["xfi", "y\u200b"])]
        assert [[one.output for one in replies] for replies in keyed] == [["XFI", "Y"]] * 2
        assert stand.ran == ["afi", "xfi", "y"]


async def test_a_rule_in_shadow_only_counts(clock: Clock) -> None:
    shadows = [InputRule(name=rule.name, patterns=rule.patterns, characters=rule.characters, function=rule.function,
                         shadow=True) for rule in (WORDS, UNSEEN, JUDGED)]  # fmt: skip
    async with policed(clock, *shadows) as (stand, _):
        assert (await stand.ask("evil\u200b")).output == "EVIL\u200b"
        assert (await stand.ask("bad")).output == "BAD"
        assert (await stand.ask("hang")).output == "HANG"
        await asyncio.sleep(1.0)
        assert counts(stand) == {
            ("words", "shadow"): 1, ("unseen", "shadow"): 1, ("judged", "shadow"): 1, ("judged", "failed"): 1,
        }  # fmt: skip
        assert stand.counters.gateway.refusals == {}


async def test_a_function_judges_what_the_model_would_get(clock: Clock) -> None:
    async with policed(clock, JUDGED, UNSEEN, WORDS) as (stand, functions):
        assert (await failure(stand, "evil")).message.endswith("rule 'words'")
        assert functions.by_rule["judged"].batches == [], "what other rules refuse is not judged"
        refused = await failure(stand, "b\u200bad")
        assert (refused.code, refused.message) == (
            errors.REJECTED_BY_POLICY, "the input policy refuses this input: rule 'judged'",
        )  # fmt: skip
        assert (await stand.ask("good")).output == "GOOD"
        await stand.ask(b'["a", {"b": "c"}]', parameters=b'{"d": "e"}')
        assert functions.by_rule["judged"].batches == [["bad"], ["good"], ["a\nb\nc\nd\ne"]]
        assert counts(stand) == {("words", "refused"): 1, ("unseen", "changed"): 1, ("judged", "refused"): 1}


@pytest.mark.parametrize("on_failure", ["refuse", "admit"])
async def test_a_failing_function_refuses_or_admits_as_ruled(on_failure: str, clock: Clock) -> None:
    async with policed(clock, InputRule(name="judged", function="a:b", on_failure=on_failure)) as (stand, _):
        reply = await stand.ask("hang")
        if on_failure == "admit":
            assert reply.output == "HANG"
        else:
            assert failure_of(reply).code == errors.REJECTED_BY_POLICY
            assert failure_of(reply).message == "the input policy could not judge this input: rule 'judged'"
        assert counts(stand) == {("judged", "failed"): 1}
        assert (await stand.ask("good", caller=Principal("bob", "umbrella", 1))).output == "GOOD"


async def test_who_has_ended_a_process_is_told_to_come_back_and_once_for_several_inputs(clock: Clock) -> None:
    async with policed(clock, JUDGED) as (stand, _):
        assert (await failure(stand, "crash")).code == errors.REJECTED_BY_POLICY
        refused = await failure(stand, "good")
        assert (refused.code, refused.reason, refused.retry_after) == (errors.SERVICE_OVERLOADED, "policy", 1.0)
        refused = failure_of((await ask_many(stand, ["good", "good"]))[0])
        assert (refused.code, refused.message.count("counted from 0")) == (errors.SERVICE_OVERLOADED, 1)


async def test_a_prompt_of_which_many_choices_are_asked_is_judged_once(clock: Clock) -> None:
    async with policed(clock, JUDGED, collapse=True) as (stand, functions):
        asked = functions.by_rule["judged"].batches
        assert [one.output for one in await ask_many(stand, ["one"] * 20 + ["two"] * 20)] == ["ONE"] * 20 + ["TWO"] * 20
        assert sorted(stand.ran) == ["one", "two"], "what is asked for alike runs once, too"
        assert [text for batch in asked for text in batch] == ["one", "two"]
        [reply] = await ask_many(stand, ["one"] * 20 + ["bad"] * 20)
        assert failure_of(reply).message.startswith("input 20 of 40, counted from 0: ")


async def test_a_function_is_not_asked_of_numbers(clock: Clock) -> None:
    async with policed(clock, JUDGED) as (stand, functions):
        worker = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, takes=ValueKind.TENSORS.value)
        stand.gateway.served.learn([worker])
        assert (await stand.ask(tensors(2))).output == tensors(2)
        assert functions.by_rule["judged"].batches == []


async def test_functions_of_several_rules_are_asked_one_after_the_other(clock: Clock) -> None:
    async with policed(clock, JUDGED, InputRule(name="second", function="a:b")) as (stand, functions):
        assert (await stand.ask("good")).output == "GOOD"
        assert (await failure(stand, "bad")).message.endswith("rule 'judged'")
        assert functions.by_rule["second"].batches == [["good"]]


async def test_the_deadline_holds_while_waiting_for_a_verdict_and_afterwards(clock: Clock) -> None:
    async with policed(clock, InputRule(name="judged", function="a:b", deadline_ms=5000.0), seconds=0.4) as (stand, _):
        begun = stand._clock()
        assert (await failure(stand, "good", timeout=0.2)).code == errors.DEADLINE_EXCEEDED
        assert stand._clock() - begun == pytest.approx(0.2, abs=0.1)
        await asyncio.sleep(1.0)
        assert stand.ran == []
        assert (await stand.ask("good", timeout=0.55)).output == "GOOD"


async def test_a_task_is_admitted_only_after_its_verdict(clock: Clock) -> None:
    async with policed(clock, JUDGED, seconds=0.3) as (stand, _):

        class Sink(FutureSink):
            admitted_at = 0.0

            def admitted(self) -> None:
                self.admitted_at = stand._clock()

        def submit(text: str) -> tuple[Sink, str]:
            sink, task = Sink(), request(text, task=True)
            stand.gateway.submit(sink, task)
            return sink, task.id

        begun = stand._clock()
        sink, id = submit("good")
        assert await stand.gateway.outcome(ANYBODY.tenant, id) is EntryState.QUEUED
        assert (await sink.replies)[0].output == "GOOD"
        assert sink.admitted_at - begun == pytest.approx(0.3)
        refused, _ = submit("bad")
        assert codes(await refused.replies) == [errors.REJECTED_BY_POLICY]
        assert refused.admitted_at == 0.0
        await stand.gateway.cancel(ANYBODY.tenant, submit("good")[1])
        await asyncio.sleep(1.0)
        assert stand.ran == ["good"]


async def test_a_drain_waits_for_verdicts_for_clients_that_stay_and_an_end_answers_them(clock: Clock) -> None:
    async with policed(clock, JUDGED) as (stand, _):
        left, asking, also_left = [stand.asking(text) for text in ("left", "good", "left")]
        await asyncio.sleep(0)
        left.cancel()
        also_left.cancel()
        await stand.service.drain()
        assert (await asking).output == "GOOD"
        assert stand.ran == ["good"], "what clients have left is not judged, and does not run"
        late = stand.asking("good")
        await asyncio.sleep(0)
        await stand.service.stop()
        assert codes([await late]) == [errors.DRAINING]


async def test_a_queue_that_has_filled_meanwhile_refuses_who_comes_from_a_judge(clock: Clock) -> None:
    async with policed(clock, JUDGED, max_queue=3) as (stand, _):
        stand.gateway._session.near = None
        asking = [stand.asking("good") for _ in range(20)]
        assert set(codes([await one for one in asking])) == {"ok", errors.SERVICE_OVERLOADED}


async def test_another_policy_takes_over_without_loss_and_old_counts_go(clock: Clock) -> None:
    async with policed(clock, JUDGED, WORDS) as (stand, functions):
        assert stand.gate is not None
        assert codes([await stand.ask("evil")]) == [errors.REJECTED_BY_POLICY]
        waiting = [stand.asking(text) for text in ("good", "bad")]
        await asyncio.sleep(0)
        former = stand.gate.replace(functions.policy(InputRule(name="new", patterns=("good",)))(stand.counters))
        for judge in former.judges:
            judge.retire()
        assert codes([await stand.ask("evil"), await stand.ask("good")]) == ["ok", errors.REJECTED_BY_POLICY]
        assert codes([await one for one in waiting]) == ["ok", errors.REJECTED_BY_POLICY]
        assert all(judge.over for judge in former.judges)
        assert counts(stand) == {("new", "refused"): 1}
