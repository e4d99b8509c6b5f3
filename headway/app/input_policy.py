"""A process's input policy: reads the policy file and starts its functions, and does both again on SIGHUP."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from headway.app.backends import SlotPlan, make_backend
from headway.backends.process.group_guard import GroupGuard
from headway.config import Settings
from headway.config.extras import needing
from headway.config.target import FileTarget, ModuleTarget, Target, parse_target
from headway.core.input_policy import InputRule
from headway.errors import SettingError, TargetError
from headway.gateway.input_gate import InputGate, InputPolicy
from headway.gateway.judge import Judge
from headway.ports import Backend
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)


class PolicyResource:
    """A process's input policy, as a `Rereadable` resource. `gate` applies the current rules. `counts` counts requests by rule
    and effect, and `restarts` counts restarts by worker. Raises SettingError if the file can't be used."""

    rereads = "the input policy"

    def __init__(
        self, settings: Settings, models: Sequence[str], counts: dict[tuple[str, str], int], restarts: dict[str, int]
    ) -> None:
        self._settings, self._models, self._restarts = settings, models, restarts
        self._path = Path(settings.input_policy)
        self._guard = GroupGuard()
        self._supervisor: Supervisor | None = None
        self._policy = self._read()
        self._former: list[InputPolicy] = []
        self.gate = InputGate(self._policy, counts)

    async def open(self) -> None:
        """Start the functions' processes. Raises SettingError if a function can't be used."""
        await self._open(self._policy)

    def start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        for judge in self._policy.judges:
            judge.start(supervisor)

    async def reread(self) -> None:
        """Apply the rules that the file has now, and reload their functions. Requests that wait for a verdict from a previous function
        still get it. If the file can't be used, keep the previous rules and raise SettingError."""
        policy = self._read()
        await self._open(policy)
        if self._supervisor is not None:
            for judge in policy.judges:
                judge.start(self._supervisor)
        self._policy = policy
        former = self.gate.replace(policy)
        for judge in former.judges:
            judge.retire()
        self._former = [*(old for old in self._former if not all(judge.over for judge in old.judges)), former]

    async def close(self) -> None:
        for policy in (*self._former, self._policy):
            for judge in policy.judges:
                await judge.close()

    def _read(self) -> InputPolicy:
        from headway.input_policy import read_policy

        tiers, reason = self._settings.tier_names, "has patterns, but the package google-re2 is not installed"
        with needing("policy", "input_policy", str(self._path), reason):
            file = read_policy(self._path, tiers, () if self._settings.broker else self._models)
        judges = {rule.name: self._judge(rule) for rule in file.rules if rule.function}
        return InputPolicy(file.rules, file.searches, judges, tiers, self._models)

    def _judge(self, rule: InputRule) -> Judge:
        try:
            target = parse_target(rule.function)
        except TargetError as exc:
            raise self._unusable(rule, exc) from None
        if not isinstance(target, ModuleTarget | FileTarget):
            hint = "Write module:function, or path/file.py:function."
            raise SettingError(self._where(rule), rule.function, "is not a Python function", hint)
        return Judge(rule, partial(self._make, rule, target), time.monotonic, random.random, self._count_restart)

    def _make(self, rule: InputRule, target: Target, number: int) -> Backend:
        plan = SlotPlan(self._settings, f"policy-{rule.name}-{number}", guard=self._guard, warms_up=False)
        return make_backend(target, plan)

    def _count_restart(self, rule: str) -> None:
        self._restarts[f"policy-{rule}"] += 1

    async def _open(self, policy: InputPolicy) -> None:
        opened: list[Judge] = []
        try:
            for judge in policy.judges:
                opened.append(judge)
                await judge.open()
        except BaseException as exc:
            for judge in opened:
                await judge.close()
            if isinstance(exc, TargetError):
                raise self._unusable(opened[-1].rule, exc) from None
            raise

    def _where(self, rule: InputRule) -> str:
        return f"{self._path}: rule {rule.name}: function"

    def _unusable(self, rule: InputRule, error: TargetError) -> SettingError:
        if error.trace:
            log.error("the function cannot be used", rule=rule.name, traceback=error.trace)
        reason = f"cannot be used: {str(error).rstrip('.')}"
        if reason.endswith("?") and ". " in reason:  # The error ends with a suggestion. Use it as the hint.
            reason, hint = reason.rsplit(". ", 1)
            return SettingError(self._where(rule), rule.function, reason, hint)
        return SettingError(self._where(rule), rule.function, reason, _HINT)


_HINT = "Name a function like def check(texts: list[str]) -> list[bool], which returns True for each text to accept."
