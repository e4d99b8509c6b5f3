"""Input gate: carries out the input policy in front of every request's queue, whichever door it came through.

    submit ──▶ texts are screened ──▶ judged by functions, if rules have some ──▶ handed on
                    │ a rule refuses        │ refused, or no verdict
                    ▼                       ▼
                 refused                 refused

What the screen changes is what the model gets, and what dedup keys are made of. A request with several inputs is screened
and judged as one, before any of them is handed on. Whoever waits for a judge is a pending request without a session: its
deadline, its client's departure and a shutdown end it as any other.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from headway.core import failures
from headway.core.input_policy import TOO_MANY, Effect, InputRule, Noted, Screen, Search, text_of, texts_of
from headway.gateway.judge import CallerId, Judge, Question, Verdict
from headway.gateway.pending import Decided, Judgement, PendingRequest, SeveralInputs
from headway.gateway.served_models import ServedModels
from headway.model import Failure, InferenceRequest, Octets, Value, ValueKind


class Inspection(msgspec.Struct):
    """Result of a look at a request.

    Attributes:
        input, parameters: what the model gets.
        failure: refusal; None when there is none.
        judgement: what the request has to wait for; None for nothing.
    """

    input: Value
    parameters: bytes
    failure: Failure | None = None
    judgement: Judgement | None = None


Plan = tuple[Screen, tuple[Judge, ...]]
"""Screen and judges of one tier and model."""

MOST_PLANS = 2_000
"""Most plans that are kept ready."""


class InputPolicy:
    """Rules in force, with what carries them out.

    Arguments:
        rules: all rules.
        searches: search of each rule with patterns, by its name.
        judges: judge of each rule with a function, by its name.
        tiers: names of all tiers.
        models: names of the models that are known at first.

    Attributes:
        names: names under which requests are counted.
        judges: all judges.
    """

    def __init__(
        self,
        rules: Sequence[InputRule],
        searches: Mapping[str, Search],
        judges: Mapping[str, Judge],
        tiers: Sequence[str],
        models: Sequence[str],
    ) -> None:
        self.names = frozenset((TOO_MANY, *(rule.name for rule in rules)))
        self.judges = tuple(judges.values())
        self._made_of = rules, searches, judges, tiers
        self._plans: dict[tuple[int, str], Plan | None] = {}
        for index in range(len(tiers)):
            for model in models:
                self._plans[index, model] = self._plan(index, model)

    def plan(self, tier: int, model: str) -> Plan | None:
        """Return the screen and the judges that apply to requests of a tier and a model; None where no rule applies."""
        try:
            return self._plans[tier, model]
        except KeyError:  # A model that came since, or none.
            plan = self._plan(tier, model)
            if len(self._plans) < MOST_PLANS:
                self._plans[tier, model] = plan
            return plan

    def _plan(self, tier: int, model: str) -> Plan | None:
        rules, searches, judges, tiers = self._made_of
        those = [rule for rule in rules if rule.applies(tiers[tier], model)]
        return (Screen(those, searches), tuple(judges[rule.name] for rule in those if rule.function)) if those else None


class InputGate:
    """Gate of one gateway.

    Arguments:
        policy: policy in force at first.
        counts: counts of what rules did, by rule and effect.
    """

    def __init__(self, policy: InputPolicy, counts: dict[tuple[str, str], int]) -> None:
        self._policy = policy
        self._counts = counts

    @property
    def names(self) -> frozenset[str]:
        """Names of the rules in force."""
        return self._policy.names

    def plan(self, tier: int, model: str) -> Plan | None:
        """Screen and judges in force for a tier and a model; None where no rule applies."""
        return self._policy.plan(tier, model)

    def replace(self, policy: InputPolicy) -> InputPolicy:
        """Put another policy in force; returns the former one. Counts of rules that are gone are dropped."""
        former, self._policy = self._policy, policy
        for key in [key for key in self._counts if key[0] not in policy.names]:
            del self._counts[key]
        return former

    def _count(self, name: str, effect: Effect) -> None:
        """Count what a rule did, unless it is gone meanwhile: then its name is no label any more."""
        if name in self._policy.names:
            self._counts[name, effect.value] += 1

    def inspect(
        self,
        caller: CallerId,
        request: InferenceRequest,
        served: ServedModels,
        decided: Decided,
        several: SeveralInputs | None = None,
    ) -> Inspection:
        """Look at a request; of one with several inputs at all of them, once.

        Arguments:
            caller: who asks.
            request: the request.
            served: models that are served.
            decided: takes the verdict, if the request has to wait for one.
            several: request with several inputs of which this is one.
        """
        model, input, parameters = request.model, request.input, request.parameters
        if several is not None and several.inspected:
            judgement = several.judgement
            return Inspection(input, parameters, judgement.refusal if judgement is not None else None, judgement)
        plan = self._policy.plan(max(request.principal.tier, request.options.tier), model)
        if plan is None:
            return Inspection(input, parameters)
        screen, judges = plan
        octets = served[model].takes is ValueKind.BYTES
        noted: Noted = set()
        inputs = [input] if several is None else several.inputs
        screened, places = list[Value](), list[int]()
        refusing = ""
        for place, value in enumerate(inputs):
            if place and value is inputs[place - 1]:
                screened.append(screened[-1])
                continue
            one, refusing = _screened(screen, value, octets, noted)
            if refusing:
                break
            screened.append(one)
            places.append(place)
        if parameters and not refusing:
            changed, refusing = screen.value(parameters, noted)
            parameters = changed if isinstance(changed, bytes) else parameters
        for name, effect in noted:
            self._count(name, effect)
        if refusing:
            return Inspection(input, parameters, _of_several(failures.by_policy(refusing), len(screened), len(inputs)))
        judgement = None
        if judges and (texts := _texts([screened[place] for place in places], parameters, octets)) is not None:
            judgement = Judgement(caller, texts, judges, places, len(inputs), decided)
        if several is not None:
            several.take_inspected(screened, parameters, judgement)
        return Inspection(screened[0], parameters, None, judgement)

    def hold(self, judgement: Judgement, pending: PendingRequest) -> bool:
        """Let a request wait for the verdict. False: there is nothing to wait for any more."""
        if not judgement.begun:
            judgement.begun = True
            self._ask_shadows(judgement)
            if not judgement.judges:
                judgement.decided = True
            else:
                self._ask_next(judgement)
        if judgement.decided:
            return False
        judgement.pending.append(pending)
        return True

    def _ask_shadows(self, judgement: Judgement) -> None:
        """Ask the judges whose rules are only counted. The request does not wait for them."""
        for judge in judgement.judges:
            if judge.rule.shadow:
                told = partial(self._note_shadow, judge.rule.name)
                if not judge.ask(Question(judgement.caller, judgement.texts, told, _always)):
                    self._count(judge.rule.name, Effect.FAILED)
        judgement.judges = [judge for judge in judgement.judges if not judge.rule.shadow]

    def _note_shadow(self, name: str, verdict: Verdict, position: int) -> None:
        if verdict is not Verdict.LET_IN:
            self._count(name, Effect.SHADOW if verdict is Verdict.REFUSED else Effect.FAILED)

    def _ask_next(self, judgement: Judgement) -> None:
        """Ask the next judge, or let the request go on."""
        if not judgement.judges:
            self._decide(judgement, None)
            return
        judge = judgement.judges.pop(0)
        told = partial(self._take, judgement, judge.rule)
        if not judge.ask(Question(judgement.caller, judgement.texts, told, judgement.wanted)):
            asyncio.get_running_loop().call_soon(told, Verdict.BUSY, 0)

    def _take(self, judgement: Judgement, rule: InputRule, verdict: Verdict, position: int) -> None:
        """Take the verdict of one judge."""
        if verdict is Verdict.LET_IN:
            self._ask_next(judgement)
            return
        if verdict is Verdict.REFUSED:
            self._count(rule.name, Effect.REFUSED)
            failure = failures.by_policy(rule.name)
        else:
            self._count(rule.name, Effect.FAILED)
            if rule.on_failure == "admit":
                self._ask_next(judgement)
                return
            failure = failures.unjudged(rule.name, busy=verdict is Verdict.BUSY)
        self._decide(judgement, _of_several(failure, judgement.places[position], judgement.count))

    def _decide(self, judgement: Judgement, failure: Failure | None) -> None:
        judgement.decided, judgement.refusal = True, failure
        pending, judgement.pending = judgement.pending, []
        judgement.tell([one for one in pending if not one.ended], failure)


def _always() -> bool:
    return True


def _of_several(failure: Failure, position: int, count: int) -> Failure:
    """Failure that names the input, where there are several."""
    return failure if position == count else failures.of_input(position, count, failure)


def _screened(screen: Screen, value: Value, octets: bool, noted: Noted) -> tuple[Value, str]:
    """Value as the model gets it, and the rule that refuses it. Octets are looked at if they are UTF-8."""
    if not octets or isinstance(value, Octets):
        return screen.value(value, noted)
    text = _decoded(value)
    if text is None:
        return value, ""
    changed, refusing = screen.text(text, noted)
    return (value if changed == text else base64.b64encode(changed.encode()).decode()), refusing


def _decoded(value: Value) -> str | None:
    """Text that octets, or octets in base64, stand for; None where they are no text."""
    if isinstance(value, Octets):
        return text_of(value)
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _texts(inputs: Sequence[Value], parameters: bytes, octets: bool) -> list[str] | None:
    """Text of each input for a judge, that of the parameters with the first; None where there is no text in any."""
    found = [[_decoded(value) or ""] if octets else texts_of(value) for value in inputs]
    if parameters:
        found[0] = [*filter(None, found[0]), *texts_of(parameters)]
    texts = ["\n".join(those) for those in found]
    return texts if any(texts) else None
