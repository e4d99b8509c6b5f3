"""Autoscaler rules, as an operator writes them in a list. Each rule takes effect once its condition has held for its time.

    [{queue_above = 500, for_s = 30, add = 3}, {utilisation_below = 0.4, for_s = 900, remove = 1}]

Utilisation is the offered load over the measured capacity, not the share of time that GPUs are busy. Under `paced`, batches leave
half full, so a GPU at half its capacity is busy nearly all the time, and a rule on busy time would add GPUs for ever."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

QUEUE_ABOVE, UTILISATION_ABOVE, UTILISATION_BELOW = "queue_above", "utilisation_above", "utilisation_below"
_CONDITIONS = (QUEUE_ABOVE, UTILISATION_ABOVE, UTILISATION_BELOW)
_NAMES = (*_CONDITIONS, "for_s", "add", "remove")
MOST_RULES = 32  # Limit on the rules of a model.
LONGEST_S = 86_400.0  # Longest time in seconds that a rule may require its condition to hold.
MOST_STEP = 1_000  # Limit on the workers that one rule adds or removes.
MOST_QUEUE, MOST_UTILISATION = 10_000_000, 10.0


class NoRules(ValueError):
    """The text isn't a list of rules; the message says why."""


class ScaleRule(msgspec.Struct, frozen=True):
    """Changes the number of workers once its condition has held for its time."""

    condition: str  # QUEUE_ABOVE, UTILISATION_ABOVE or UTILISATION_BELOW.
    threshold: float  # Waiting entries, or load relative to capacity.
    for_s: float  # Seconds for which the condition must hold.
    change: int  # Workers to add or, if negative, to remove.

    def holds(self, queue: float, utilisation: float | None) -> bool:
        """Return True if the condition holds now. If the utilisation is unknown (None), no condition on it holds."""
        if self.condition == QUEUE_ABOVE:
            return queue > self.threshold
        if utilisation is None:
            return False
        return utilisation > self.threshold if self.condition == UTILISATION_ABOVE else utilisation < self.threshold

    def __str__(self) -> str:
        what, _, side = self.condition.partition("_")
        threshold = f"{self.threshold:g}" if self.condition == QUEUE_ABOVE else f"{self.threshold:.4g}"
        return f"{what} {side} {threshold} for {self.for_s:g} s"


USUAL = (
    ScaleRule(QUEUE_ABOVE, 500, 30.0, 3),
    ScaleRule(QUEUE_ABOVE, 100, 60.0, 1),
    ScaleRule(UTILISATION_ABOVE, 0.85, 300.0, 1),
    ScaleRule(UTILISATION_BELOW, 0.4, 900.0, -1),
)  # Default rules.


def read(text: str) -> tuple[ScaleRule, ...]:
    """Parse rules from JSON. Empty text means the default rules. Raises NoRules if the text isn't a list of rules."""
    if not text:
        return USUAL
    try:
        rules: object = msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise NoRules(f"it is not JSON: {exc}") from None
    return read_all(rules)


def read_all(rules: object) -> tuple[ScaleRule, ...]:
    """Read rules from decoded JSON or TOML. Raises NoRules if it isn't a list of rules."""
    if not isinstance(rules, list):
        raise NoRules("it is not a list")
    if not 1 <= len(rules) <= MOST_RULES:
        raise NoRules(f"it has {len(rules)} rules; 1 to {MOST_RULES} are allowed")
    checked = tuple(_rule(number, rule) for number, rule in enumerate(rules, 1))
    _check_band(checked)
    return checked


def write(rules: Sequence[ScaleRule]) -> str:
    """Return rules as JSON for `read`."""
    return msgspec.json.encode([_table(rule) for rule in rules]).decode()


def _table(rule: ScaleRule) -> dict[str, float]:
    step = {"add": rule.change} if rule.change > 0 else {"remove": -rule.change}
    return {rule.condition: rule.threshold, "for_s": rule.for_s, **step}


def _rule(number: int, table: object) -> ScaleRule:
    where = f"rule {number}"
    if not isinstance(table, dict):
        raise NoRules(f"{where} is not a table")
    for name in table:
        if name not in _NAMES:
            raise NoRules(f"{where} has the unknown name {str(name)[:40]!r}; a rule may have {', '.join(_NAMES)}")
    condition = _one_of(where, table, _CONDITIONS)
    step = _one_of(where, table, ("add", "remove"))
    if "for_s" not in table:
        raise NoRules(f"{where} lacks for_s")
    if (condition == UTILISATION_BELOW) is (step == "add"):
        right, why = ("remove", "low") if step == "add" else ("add", "high")
        raise NoRules(
            f"{where} has {step} with {condition}, but a load that is too {why} calls for the opposite: "
            f"write {right} in its place"
        )
    most = MOST_QUEUE if condition == QUEUE_ABOVE else MOST_UTILISATION
    threshold = _number(where, table, condition, most)
    seconds = _number(where, table, "for_s", LONGEST_S)
    change = _number(where, table, step, MOST_STEP)
    if change < 1 or change != int(change):
        raise NoRules(f"{where}: {step} = {change:g} is not a whole number from 1 on")
    return ScaleRule(condition, threshold, seconds, int(change) if step == "add" else -int(change))


def _one_of(where: str, table: Mapping[Any, object], names: Sequence[str]) -> str:
    present = [name for name in names if name in table]
    if len(present) != 1:
        either = f"{', '.join(names[:-1])} or {names[-1]}"
        if not present:
            raise NoRules(f"{where} lacks {either}: a rule has one of them")
        raise NoRules(f"{where} has both {' and '.join(present)}: a rule has only one of {either}; make it two rules")
    return present[0]


def _number(where: str, table: Mapping[Any, object], name: str, most: float) -> float:
    value = table[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and 0 <= value <= most)
    ):
        raise NoRules(f"{where}: {name} = {value!r} is not a number from 0 to {most:g}"[:200])
    return float(value)


def _check_band(rules: Sequence[ScaleRule]) -> None:
    """Check that no load both adds and removes workers; otherwise the fleet would flap."""
    above = [rule.threshold for rule in rules if rule.condition == UTILISATION_ABOVE]
    below = [rule.threshold for rule in rules if rule.condition == UTILISATION_BELOW]
    if above and below and max(below) >= min(above):
        raise NoRules(f"utilisation_below {max(below):g} is not below utilisation_above {min(above):g}: it would flap")
