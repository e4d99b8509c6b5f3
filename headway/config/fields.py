"""Descriptions of settings, and of options of tools such as `headway simulate`. Each stands at the field that it describes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields
from enum import Enum, Flag, auto
from typing import Any

import msgspec

from headway.core.excerpt import nearest
from headway.core.policies import POLICIES
from headway.errors import SettingError


class RolePart(Flag):
    """Parts of a process, which depend on its role."""

    GATEWAY = auto()
    BATCHERS = auto()
    CONTROLLER = auto()


class Own(Enum):
    """Scope of a setting's values: the process, each model, or each version of a model."""

    PROCESS = 0
    MODEL = 1
    VERSION = 2
    """Only workers use the value, so versions may differ."""


class Term(Enum):
    """How workers report a model's value, if gateways have to know it."""

    NO = 0
    CHANGED = 1
    ALWAYS = 2
    """Always report it, as the queue has to use the workers' value."""


def outside(value: float, low: float, high: float, unit: str = "") -> tuple[str, str] | None:
    """Return the reason and hint for a number that is too low or too high; None for a good one."""
    if low <= value <= high:
        return None
    return f"must lie between {low:.15g} and {high:.15g} {unit}".rstrip(), "Choose a value in that range."


class TextForm(msgspec.Struct, frozen=True):
    """Pattern of a whole text, with the reason and hint for texts that don't match."""

    pattern: str
    reason: str
    hint: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a setting. `group` is its heading in the help. `within` are the bounds of a number, both allowed. `among` are
    the only texts allowed; empty if others are, too. Without the setting `needs`, it does nothing. `parts` are the parts of a
    process that use it; None if every process does. `show` makes a text with a secret fit to be printed. The short help of commands
    with many settings lists it only if `common` is True."""

    default: Any
    group: str
    help: str
    unit: str = ""
    within: tuple[float, float] | None = None
    among: tuple[str, ...] = ()
    form: TextForm | None = None
    needs: str = ""
    parts: RolePart | None = None
    own: Own = Own.PROCESS
    term: Term = Term.NO
    show: Callable[[str], str] | None = None
    common: bool = False

    def fault(self, value: Any) -> tuple[str, str] | None:
        """Return the reason and hint for a value that is wrong by itself; None for a good value."""
        if self.within is not None and value is not None:
            unit = self.unit.partition(" to ")[0].strip("0123456789")
            low, high = self.within
            if wrong := outside(value, low, high, unit):
                return wrong
        if self.among and value not in self.among:
            near = nearest(value, self.among)
            suggestion = f"Did you mean {near[0]}? " if near else ""
            return "is not known", f"{suggestion}Use {' or '.join(self.among)}."
        if self.form is not None and not re.fullmatch(self.form.pattern, value):
            return self.form.reason, self.form.hint
        return None

    def shown(self, value: object) -> object:
        if self.show is None:
            return value
        return self.show(value) if isinstance(value, str) else "…"


def setting(
    default: Any, group: str, help: str, unit: str = "", *, show: Callable[[str], str] | None = None, **attributes: Any
) -> Any:
    """Return a field of Settings. See `Setting` for its `attributes`."""
    fact = Setting(default=default, group=group, help=help, unit=unit, show=show, **attributes)
    return field(default=default, repr=show is None, metadata={"setting": fact})


_NAME = "[A-Za-z0-9_.:/-]{1,128}"
NAME = TextForm(_NAME, "must be 1 to 128 letters, digits or -_.:/", "For example minilm-v2.")
NAME_OR_NONE = TextForm(f"|{_NAME}", NAME.reason, NAME.hint)
FUNCTION = TextForm(
    r"[A-Za-z_][A-Za-z0-9_]{0,127}",
    "is neither chars nor the name of a function",
    "Name a function of the target as its module does, for example tokens.",
)
ADDRESS = TextForm(r"[A-Za-z0-9_.:%-]{1,253}", "is no address or host name", "For example 127.0.0.1 or ::1.")
_ORIGIN = r"https?://[a-z0-9.\[\]:-]+"
ORIGINS = TextForm(
    rf"|\*|{_ORIGIN}(,\s*{_ORIGIN})*",
    "must be origins, each of scheme, host and perhaps a port, without a path, or *",
    "For example https://app.example,http://localhost:5173.",
)
HOST_NAMES = TextForm(
    r"(?:[A-Za-z0-9_.-]{1,253}(?:,[A-Za-z0-9_.-]{1,253}){0,63})?",
    "must be host names, without ports, with commas between them",
    "For example ops.example.com,gpu-1.",
)
TOKEN = TextForm(r"[!-~]{0,4096}", "must be printable ASCII without spaces", "Choose letters and digits.")
REMOTE_MODEL = TextForm(r"[!-~]{0,256}", "must be printable ASCII without spaces", "For example gpt-oss-20b.")


def hidden(text: str) -> str:
    """Return the text to print instead of a secret."""
    return "…"


def joined(words: Iterable[str], last: str) -> str:
    """Join words with commas, and with `last` before the last one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def unset_wait() -> str:
    """Return a text for the help that tells how long each policy waits by default."""
    policies_by_wait: dict[str, list[str]] = {}
    for name, policy in POLICIES.items():
        if not policy.own_waits:
            wait = "none" if math.isinf(policy.wait) else f"{policy.wait * 1000:g}"
            policies_by_wait.setdefault(wait, []).append(name)
    return ", ".join(f"{wait} for {joined(names, 'and')}" for wait, names in sorted(policies_by_wait.items()))


class ToolOption(msgspec.Struct, frozen=True, kw_only=True):
    """Option of a tool. `default` and `within` are in the option's unit. `per` of these units make one of the field's unit, such as
    1000 for an option in ms and a field in seconds. Both bounds in `within` are allowed. `type` is str if the tool parses the
    text."""

    flag: str
    metavar: str
    group: str
    help: str
    type: type = float
    default: Any = None
    unit: str = ""
    per: float = 1.0
    within: tuple[float, float] | None = None
    multiple: bool = False

    def read(self, value: Any) -> Any:
        """Convert a value of the option to the field's unit."""
        return value if value is None or self.per == 1.0 else value / self.per


def tool_option(
    default: Any, flag: str, metavar: str, group: str, help: str, *, repr: bool = True, default_factory: Any = MISSING,
    **attributes: Any,
) -> Any:  # fmt: skip
    """Return a field with a ToolOption. `default` is in the field's unit, or `dataclasses.MISSING` for none."""
    per = attributes.get("per", 1.0)
    shown = default if isinstance(default, int | float | str) else None
    if per != 1.0 and shown is not None:
        shown *= per
    metadata = {"option": ToolOption(flag=flag, metavar=metavar, group=group, help=help, default=shown, **attributes)}
    result: Any = field(default=default, default_factory=default_factory, repr=repr, metadata=metadata)
    return result


def tool_options_of(kind: Any) -> dict[str, ToolOption]:
    """Return the options of a dataclass by field name."""
    return {field.name: field.metadata["option"] for field in fields(kind) if "option" in field.metadata}


def check_options(owner: object, names: Iterable[str]) -> None:
    """Raise SettingError if a field of a dataclass is outside the bounds of its option."""
    options = tool_options_of(owner)
    for name in names:
        value, option = getattr(owner, name), options[name]
        if option.within is not None and value is not None:
            low, high = option.within
            check_within(option.flag, value * option.per, low, high, option.unit)


def check_within(flag: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Raise SettingError unless low <= value <= high."""
    if wrong := outside(value, low, high, unit):
        raise SettingError(flag, value, *wrong)
