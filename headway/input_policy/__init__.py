"""Rules of an input policy, read from a TOML file such as examples/input_policy.toml. `core.input_policy` applies them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.core.excerpt import nearest
from headway.core.input_policy import CHARACTERS, FORMS, LEAST_RUN, TOO_MANY, InputRule, Search
from headway.errors import SettingError

if TYPE_CHECKING:
    import re2

MOST_RULES = 64
MOST_PATTERNS = 256
LONGEST_PATTERN = 4096
MOST_PROCESSES = 16
MOST_DEADLINE_MS = 10_000.0
LONGEST_RUN = 1_000_000
MOST_MEMORY = 8 << 20  # Maximum bytes of memory for the expression made from a rule's patterns.

KINDS = ("normalise", "characters", "longest", "longest_run", "patterns", "function")
"""Kinds of rules, which are also keys. Each rule has exactly one of these keys, which determines its kind."""
_OPTIONS = {  # Keys for only one kind of rule, each with that kind and the allowed values (empty: any).
    "action": ("characters", ("remove", "refuse")),
    "deadline_ms": ("function", ()),
    "on_failure": ("function", ("refuse", "admit")),
    "processes": ("function", ()),
}
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")
_KEY = re.compile(r" - at `\$\.?(\w*)[^`]*`$")
_FILE_KEYS = ("shadow", "rules")


class PolicyFile(msgspec.Struct, frozen=True):
    """Content of a policy file. `searches` has the search function of each rule that has patterns, by rule name."""

    rules: tuple[InputRule, ...]
    searches: Mapping[str, Search]


def read_policy(path: Path, tiers: Sequence[str], models: Sequence[str]) -> PolicyFile:
    """Read the rules in a file, and compile their patterns. If `models` is empty, rules may name any model. Raises SettingError
    if the file is unreadable or invalid, ModuleNotFoundError if it has patterns but RE2 isn't installed."""
    table = _table(path)
    rows = table.get("rules")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        hint = "Write each rule as a [[rules]] table."
        raise SettingError(f"{path}: rules", "…", "must be a non-empty list of tables", hint)
    if len(rows) > MOST_RULES:
        reason = f"is above the limit of {MOST_RULES} rules"
        raise SettingError(f"{path}: rules", len(rows), reason, "Put patterns that belong together into one rule.")
    shadow = table.get("shadow", False)
    if not isinstance(shadow, bool):
        raise SettingError(f"{path}: shadow", shadow, "must be a boolean", "Use true or false, without quotes.")
    known = {"tiers": tuple(tiers), "models": tuple(models)}
    rules: list[InputRule] = []
    for position, row in enumerate(rows, start=1):
        where = f"{path}: rules[{position}]"
        rule = _rule(where, row, known)
        if any(other.name == rule.name for other in rules):
            raise SettingError(f"{where}.name", rule.name, "is the name of an earlier rule", "Choose another.")
        rules.append(msgspec.structs.replace(rule, shadow=True) if shadow else rule)
    return PolicyFile(tuple(rules), _searches(path, rules))


def _table(path: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        reason = f"cannot be read: {exc.strerror}"
        raise SettingError("input_policy", str(path), reason, "Specify a readable file.") from exc
    except (ValueError, RecursionError) as exc:  # Not TOML, not UTF-8, or a number of thousands of digits.
        raise SettingError("input_policy", str(path), f"is not valid TOML: {exc}", "Fix the file.") from exc
    for key in table:
        if key not in _FILE_KEYS:
            raise _unknown(f"{path}: {key}", key, table[key], _FILE_KEYS)
    return table


def _unknown(where: str, key: str, value: object, known: Sequence[str]) -> SettingError:
    near = nearest(key, known)
    hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}."
    return SettingError(where, value, "there is no such key", hint)


def _rule(where: str, row: Mapping[str, object], known: Mapping[str, tuple[str, ...]]) -> InputRule:
    keys = InputRule.__struct_fields__
    for key, value in row.items():
        if key not in keys:
            raise _unknown(f"{where}.{key}", key, value, keys)
    try:
        rule = msgspec.convert(row, InputRule)
    except msgspec.ValidationError as exc:
        path = _KEY.search(str(exc))
        key = path[1] if path else ""
        reason = str(exc) if path is None else str(exc)[: path.start()]
        raise SettingError(f"{where}.{key}" if key else where, row.get(key, "…"), reason, "Correct it.") from None
    if not _NAME.fullmatch(rule.name) or rule.name == TOO_MANY:
        reason = "must be 1 to 64 lower-case letters, digits or -_, and not " + TOO_MANY
        raise SettingError(f"{where}.name", rule.name, reason, 'For example "no-overrides".')
    kinds = [key for key in KINDS if key in row]
    if len(kinds) != 1:
        reason = f"has {' and '.join(kinds) or 'nothing to do'}"
        raise SettingError(f"{where}", rule.name, reason, f"Give each rule exactly one of {', '.join(KINDS)}.")
    _check_options(where, row, kinds[0])
    _check_kind(where, rule, kinds[0])
    for key, names in known.items():
        for name in getattr(rule, key):
            if names and name not in names:
                near = nearest(name, names)
                raise SettingError(f"{where}.{key}", name, "is not known", f"Use {' or '.join(near or names)}.")
        if key in row and not row[key]:
            raise SettingError(f"{where}.{key}", [], "is empty", "Leave it out for all.")
    return rule


def _check_options(where: str, row: Mapping[str, object], kind: str) -> None:
    for key, (needed, words) in _OPTIONS.items():
        if key not in row:
            continue
        if kind != needed:
            reason = f"has no effect in a rule with {kind}"
            raise SettingError(f"{where}.{key}", row[key], reason, f"Leave it out; it is for rules with {needed}.")
        if words and row[key] not in words:
            raise SettingError(f"{where}.{key}", row[key], "is not known", f"Use {' or '.join(words)}.")


def _check_kind(where: str, rule: InputRule, kind: str) -> None:
    def check(fits: bool, key: str, value: object, reason: str, hint: str) -> None:
        if not fits:
            raise SettingError(f"{where}.{key}", value, reason, hint)

    if kind == "normalise":
        check(rule.normalise in FORMS, kind, rule.normalise, "is not known", f"Use {' or '.join(FORMS)}.")
    elif kind == "characters":
        check(bool(rule.characters), kind, [], "names no class", f"Known are {', '.join(CHARACTERS)}.")
        for name in rule.characters:
            check(name in CHARACTERS, kind, name, "is not a character class", f"Known are {', '.join(CHARACTERS)}.")
    elif kind == "longest":
        check(rule.longest > 0, kind, rule.longest, "must be above 0", "Write the maximum number of characters.")
    elif kind == "longest_run":
        fits = LEAST_RUN <= rule.longest_run <= LONGEST_RUN
        reason = f"must lie between {LEAST_RUN} and {LONGEST_RUN}"
        check(fits, kind, rule.longest_run, reason, "Choose a value in that range.")
    elif kind == "patterns":
        fits = 1 <= len(rule.patterns) <= MOST_PATTERNS
        check(fits, kind, len(rule.patterns), f"must be 1 to {MOST_PATTERNS} patterns", "Split the rule.")
        for pattern in rule.patterns:
            fits = 1 <= len(pattern) <= LONGEST_PATTERN
            check(fits, kind, pattern, f"must have 1 to {LONGEST_PATTERN} characters", "Split it into several.")
    else:
        check(bool(rule.function), kind, rule.function, "names no function", 'Write "module:function".')
        fits = 1.0 <= rule.deadline_ms <= MOST_DEADLINE_MS
        reason = f"must lie between 1 and {MOST_DEADLINE_MS:g} ms"
        check(fits, "deadline_ms", rule.deadline_ms, reason, "Choose a value in that range.")
        fits = 1 <= rule.processes <= MOST_PROCESSES
        reason = f"must lie between 1 and {MOST_PROCESSES}"
        check(fits, "processes", rule.processes, reason, "Choose a value in that range.")


def _searches(path: Path, rules: Sequence[InputRule]) -> dict[str, Search]:
    searches: dict[str, Search] = {}
    for position, rule in enumerate(rules, start=1):
        if not rule.patterns:
            continue
        pattern = ""
        try:
            for pattern in rule.patterns:
                check_pattern(pattern)
            pattern = f"all {len(rule.patterns)}"
            searches[rule.name] = search_for(rule.patterns)
        except BadPattern as exc:
            hint = "Write it in the syntax of RE2, which has no look-around and no backreferences."
            where, reason = f"{path}: rules[{position}].patterns", f"is not a valid pattern: {exc}"
            raise SettingError(where, pattern, reason, hint) from None
    return searches


class BadPattern(ValueError):
    """RE2 doesn't accept a pattern. The message gives the reason."""


def check_pattern(pattern: str) -> None:
    r"""Check a pattern. Raises BadPattern if it is invalid or contains \Q, which would also quote the next pattern."""
    if r"\Q" in pattern:
        raise BadPattern(r"\Q is not supported; put a backslash before each special character instead")
    _compile(pattern)


def search_for(patterns: Sequence[str]) -> Search:
    """Return a function that tells whether a text contains any of the patterns. Raises BadPattern if they are too large. They
    become one expression, because an RE2.Set finds nothing once its automaton runs out of memory. For an expression, RE2 then
    continues without the automaton, which is slower but still takes linear time."""
    find = _compile("|".join(f"(?:{pattern})" for pattern in patterns)).search

    def search(text: str) -> bool:
        return find(text.encode()) is not None

    return search


def _compile(pattern: str) -> re2._Regexp:
    import re2  # It is optional, and only needed for patterns.

    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MOST_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error as exc:
        reason = exc.args[0] if exc.args else b""
        raise BadPattern(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from None
