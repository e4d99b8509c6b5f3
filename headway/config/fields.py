"""Descriptions of settings, and of the options of tools such as `headway simulate`, as metadata of dataclass fields."""

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
    """Scope of a setting: one value for the process, for each model, or for each version of a model."""

    PROCESS = 0
    MODEL = 1
    VERSION = 2  # Only workers use the value, so versions may differ.


class Term(Enum):
    """When workers report a model's value to gateways: never, only if it differs from the default, or always."""

    NO = 0
    CHANGED = 1
    ALWAYS = 2  # The queue must use the workers' value.


def outside(value: float, low: float, high: float, unit: str = "") -> tuple[str, str] | None:
    """Return the reason and hint for a number outside its bounds, or None if it is within them."""
    if low <= value <= high:
        return None
    return f"must lie between {low:.15g} and {high:.15g} {unit}".rstrip(), "Choose a value in that range."


class TextForm(msgspec.Struct, frozen=True):
    """Pattern that a string must match in full, with the reason and hint to show if it doesn't."""

    pattern: str
    reason: str
    hint: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a setting. `group` is its heading in the help. `within` are the inclusive bounds of a number. `among`
    are the allowed strings; empty if any string is allowed. `needs` names another setting; if that isn't set, this one has
    no effect. `parts` are the parts of a process that use the setting; None if every process does. `show` removes secrets
    from a string. The short help lists only `common` settings."""

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
        """Return the reason and hint for a wrong value, or None for a good one. Other settings are not taken into account."""
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
    description = Setting(default=default, group=group, help=help, unit=unit, show=show, **attributes)
    return field(default=default, repr=show is None, metadata={"setting": description})


_NAME = "[A-Za-z0-9_.:/-]{1,128}"
NAME = TextForm(_NAME, "must be 1 to 128 letters, digits or -_.:/", "For example minilm-v2.")
NAME_OR_NONE = TextForm(f"|{_NAME}", NAME.reason, NAME.hint)
FUNCTION = TextForm(
    r"[A-Za-z_][A-Za-z0-9_]{0,127}",
    "is neither chars nor the name of a function",
    "Name a function of the target's module, for example tokens.",
)
ADDRESS = TextForm(r"[A-Za-z0-9_.:%-]{1,253}", "is not an address or host name", "For example 127.0.0.1 or ::1.")
_ORIGIN = r"https?://[a-z0-9.\[\]:-]+"
ORIGINS = TextForm(
    rf"|\*|{_ORIGIN}(,\s*{_ORIGIN})*",
    "must be * or origins, each with a scheme, a host and optionally a port, but no path",
    "For example https://app.example,http://localhost:5173.",
)
HOST_NAMES = TextForm(
    r"(?:[A-Za-z0-9_.-]{1,253}(?:,[A-Za-z0-9_.-]{1,253}){0,63})?",
    "must be comma-separated host names without ports",
    "For example ops.example.com,gpu-1.",
)
TOKEN = TextForm(r"[!-~]{0,4096}", "must be printable ASCII without spaces", "Choose letters and digits.")
REMOTE_MODEL = TextForm(r"[!-~]{0,256}", "must be printable ASCII without spaces", "For example gpt-oss-20b.")


def hidden(text: str) -> str:
    """Return a placeholder for a secret."""
    return "…"


def joined(words: Iterable[str], last: str) -> str:
    """Join words with commas, and the last one with the word `last`."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def unset_wait() -> str:
    """Describe the default wait of each policy, for the help."""
    policies_by_wait: dict[str, list[str]] = {}
    for name, policy in POLICIES.items():
        if not policy.own_waits:
            wait = "none" if math.isinf(policy.wait) else f"{policy.wait * 1000:g}"
            policies_by_wait.setdefault(wait, []).append(name)
    return ", ".join(f"{wait} for {joined(names, 'and')}" for wait, names in sorted(policies_by_wait.items()))


class ToolOption(msgspec.Struct, frozen=True, kw_only=True):
    """Option of a tool. `default` and the inclusive bounds `within` are in the option's unit. `per` of these units make one unit of
    the field, for example 1000 for an option in ms and a field in seconds. `type` is str if the tool parses the value itself."""

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
    """Raise SettingError if one of these fields of a dataclass is outside the bounds of its option."""
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
