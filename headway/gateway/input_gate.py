"""The input gate. It applies the input policy to requests from all ports before they are queued.

    submit ──▶ texts are screened ──▶ judged by functions, if rules have any ──▶ handed on
                    │ a rule refuses        │ refused, or no verdict
                    ▼                       ▼
                 refused                 refused

The screened texts are what the model gets and what the dedup keys are made from. All inputs of a request are screened and judged
before any is handed on. A request that waits for a judge is pending but has no session, so it can still time out, be abandoned, or
end with the process. A gateway that has no policy doesn't import this module."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from headway.core import failures
from headway.core.input_policy import TOO_MANY, Effect, InputRule, Noted, Screen, Search, text_of, texts_of
from headway.gateway.judge import CallerId, Judge, Question, Verdict
from headway.gateway.limiter import CHARGED, Limiter
from headway.gateway.pending import Decided, Ending, Judgement, PendingRequest, SeveralInputs
from headway.gateway.served_models import ServedModels
from headway.model import Failure, InferenceRequest, Limit, Octets, QueueName, Value, ValueKind
from headway.ports import RequestQueue


class Inspection(msgspec.Struct):
    """Result of inspecting a request. `input` and `parameters` are what the model gets. `failure` is set if the request is refused,
    `judgement` if it must wait for the judges' verdict."""

    input: Value
    parameters: bytes
    failure: Failure | None = None
    judgement: Judgement | None = None


Plan = tuple[Screen, tuple[Judge, ...]]  # Screen and judges for one tier and model.
MOST_PLANS = 2_000  # Maximum number of plans to cache.


class InputPolicy:
    """The rules in force. `searches` and `judges` implement the rules, by rule name. `names` are the rule names in metrics."""

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
        """Return the screen and judges for a tier and a model; None if no rule applies."""
        try:
            return self._plans[tier, model]
        except KeyError:  # A new model, or one that isn't served.
            plan = self._plan(tier, model)
            if len(self._plans) < MOST_PLANS:
                self._plans[tier, model] = plan
            return plan

    def _plan(self, tier: int, model: str) -> Plan | None:
        rules, searches, judges, tiers = self._made_of
        applying = [rule for rule in rules if rule.applies(tiers[tier], model)]
        if not applying:
            return None
        return Screen(applying, searches), tuple(judges[rule.name] for rule in applying if rule.function)


class InputGate:
    """A gateway's gate. `counts` are keyed by rule and effect."""

    def __init__(self, policy: InputPolicy, counts: dict[tuple[str, str], int]) -> None:
        self._policy, self._counts = policy, counts

    @property
    def names(self) -> frozenset[str]:
        return self._policy.names

    def replace(self, policy: InputPolicy) -> InputPolicy:
        """Apply a new policy from now on, and return the previous one. Drops the counts of removed rules."""
        former, self._policy = self._policy, policy
        for key in [key for key in self._counts if key[0] not in policy.names]:
            del self._counts[key]
        return former

    def _count(self, name: str, effect: Effect) -> None:
        if name in self._policy.names:  # Otherwise the rule was removed in the meantime.
            self._counts[name, effect.value] += 1

    def inspect(
        self,
        caller: CallerId,
        request: InferenceRequest,
        served: ServedModels,
        decided: Decided,
        several: SeveralInputs | None = None,
    ) -> Inspection:
        """Inspect a request. The first call for several inputs inspects all of them. If the request must wait for a verdict,
        `decided` is called with it."""
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
            cleaned, refusing = _screened(screen, value, octets, noted)
            if refusing:
                break
            screened.append(cleaned)
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
        """Let a request wait for the verdict. Returns False if the verdict is already known."""
        if not judgement.begun:
            judgement.begun = True
            self._ask_shadows(judgement)
            if judgement.judges:
                self._ask_next(judgement)
            else:
                judgement.decided = True
        if judgement.decided:
            return False
        judgement.pending.append(pending)
        return True

    def _ask_shadows(self, judgement: Judgement) -> None:
        """Ask the judges of rules in shadow mode. Their verdicts are only counted, and the request doesn't wait for them."""
        for judge in judgement.judges:
            if judge.rule.shadow:
                on_verdict = partial(self._note_shadow, judge.rule.name)
                if not judge.ask(Question(judgement.caller, judgement.texts, on_verdict, lambda: True)):
                    self._count(judge.rule.name, Effect.FAILED)
        judgement.judges = [judge for judge in judgement.judges if not judge.rule.shadow]

    def _note_shadow(self, name: str, verdict: Verdict, position: int) -> None:
        if verdict is not Verdict.LET_IN:
            self._count(name, Effect.SHADOW if verdict is Verdict.REFUSED else Effect.FAILED)

    def _ask_next(self, judgement: Judgement) -> None:
        """Ask the next judge, or let the request pass."""
        if not judgement.judges:
            self._decide(judgement, None)
            return
        judge = judgement.judges.pop(0)
        on_verdict = partial(self._take, judgement, judge.rule)
        if not judge.ask(Question(judgement.caller, judgement.texts, on_verdict, judgement.wanted)):
            asyncio.get_running_loop().call_soon(on_verdict, Verdict.BUSY, 0)

    def _take(self, judgement: Judgement, rule: InputRule, verdict: Verdict, position: int) -> None:
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
        judgement.tell([request for request in pending if not request.ended], failure)


class Screening:
    """Passes requests through the input gate. Afterwards it calls `hand_on` to offer a request to the broker, or `answer` to
    refuse it."""

    def __init__(
        self,
        gate: InputGate,
        served: ServedModels,
        limiter: Limiter,
        hand_on: Callable[[PendingRequest], None],
        answer: Callable[[PendingRequest, Failure, Ending], None],
    ) -> None:
        self._gate, self._served, self._limiter = gate, served, limiter
        self._hand_on, self._answer = hand_on, answer

    def inspect(
        self, request: InferenceRequest, several: SeveralInputs | None, limits: tuple[Limit, ...], broker: RequestQueue
    ) -> tuple[InferenceRequest, Failure | None, Judgement | None]:
        """Check `limits`, then apply the policy. Returns the changed request, its refusal if any, and the verdict to wait for."""
        if limits and (over := self._limiter.excess(limits, broker)) is not None:
            return request, over, None
        principal, options = request.principal, request.options
        first = several is not None and not several.inspected
        caller = principal.tenant, principal.user if options.origin is None else options.origin
        inspection = self._gate.inspect(caller, request, self._served, self._decide, several)
        if first and options.whole and several is not None:
            whole = several.digest(QueueName(request.model, options.version))
            options = msgspec.structs.replace(options, whole=whole)
        request = msgspec.structs.replace(
            request, options=options, input=inspection.input, parameters=inspection.parameters
        )
        return request, inspection.failure, inspection.judgement

    def hold(self, judgement: Judgement, pending: PendingRequest) -> None:
        """Let a request wait for its verdict, or hand it on if the verdict is known."""
        if self._gate.hold(judgement, pending):
            # Charged until the verdict, because otherwise any number of requests could wait.
            self._limiter.charge(pending.entry.limits)
        else:
            self._hand_on(pending)

    def _decide(self, waited: Sequence[PendingRequest], failure: Failure | None) -> None:
        """Hand on the requests that waited for a verdict. If the verdict refuses them, answer the first; this ends them all."""
        for pending in waited:
            self._limiter.refund(pending.entry.limits)
        if failure is None:
            for pending in waited:
                self._hand_on(pending)
        elif waited:
            first = waited[0]
            self._limiter.forgo(first.entry.model, first.entry.tenant, first.entry.tier, len(waited))
            if failure.code in CHARGED:
                limits = first.entry.limits
                self._limiter.charge(limits, limits[0].counting if limits else 1)
            self._answer(first, failure, Ending.REFUSED)


def _of_several(failure: Failure, position: int, count: int) -> Failure:
    return failure if position == count else failures.of_input(position, count, failure)


def _screened(screen: Screen, value: Value, octets: bool, noted: Noted) -> tuple[Value, str]:
    """Return the screened value, and the name of a rule that refuses it, or "". Bytes are screened if they are UTF-8."""
    if not octets or isinstance(value, Octets):
        return screen.value(value, noted)
    text = _decoded(value)
    if text is None:
        return value, ""
    changed, refusing = screen.text(text, noted)
    return (value if changed == text else base64.b64encode(changed.encode()).decode()), refusing


def _decoded(value: Value) -> str | None:
    """Return the text contained in bytes or base64; None if the bytes aren't text."""
    if isinstance(value, Octets):
        return text_of(value)
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _texts(inputs: Sequence[Value], parameters: bytes, octets: bool) -> list[str] | None:
    """Return the text of each input for a judge; None if there is no text. The first includes the text of the parameters."""
    parts = [[_decoded(value) or ""] if octets else texts_of(value) for value in inputs]
    if parameters:
        parts[0] = [*filter(None, parts[0]), *texts_of(parameters)]
    texts = ["\n".join(of_input) for of_input in parts]
    return texts if any(texts) else None
