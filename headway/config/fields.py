"""Description of a setting: its default, its help, the bounds of its value, and whom it concerns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import field
from enum import Enum, Flag, auto
from typing import Any

import msgspec

from headway.core.excerpt import nearest
from headway.core.policies import POLICIES


class RolePart(Flag):
    """Parts of a process. Its role says which it has."""

    GATEWAY = auto()
    BATCHERS = auto()
    CONTROLLER = auto()


class Own(Enum):
    """Scope of a setting's values: the process, each model, or each version of a model."""

    PROCESS = 0
    MODEL = 1
    VERSION = 2
    """Only workers use the value, so versions may differ; the model may have one, too."""


class Term(Enum):
    """Whether workers report a model's value, because gateways have to know it."""

    NO = 0
    CHANGED = 1
    """Report it if it is not the default."""
    ALWAYS = 2
    """Always report it: the queue has to use the workers' value."""


def outside(value: float, low: float, high: float, unit: str = "") -> tuple[str, str] | None:
    """Return what is wrong with a number, and what to do, unless low <= value <= high."""
    if low <= value <= high:
        return None
    return f"must lie between {low:.15g} and {high:.15g} {unit}".rstrip(), "Choose a value in that range."


class TextForm(msgspec.Struct, frozen=True):
    """Pattern of a whole text, and the reason and hint for a text that doesn't match."""

    pattern: str
    reason: str
    hint: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a setting.

    Attributes:
        group: heading that it is listed under.
        unit: unit of its value; empty if it has none.
        within: bounds of a number, both allowed.
        among: the only texts allowed; empty if others are, too.
        needs: setting without which it does nothing.
        parts: parts of a process that use it; None if every process does.
        show: makes a text with a secret fit to be printed; None if nothing in it is secret.
        common: True to list it in the short help of commands with many settings.
    """

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
        """Return what is wrong with a value by itself, and what to do; None if nothing is."""
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
        """Return `value` as it may be printed."""
        if self.show is None:
            return value
        return self.show(value) if isinstance(value, str) else "…"


def setting(
    default: Any, group: str, help: str, unit: str = "", *, show: Callable[[str], str] | None = None, **attributes: Any
) -> Any:
    """Return a field of Settings. `attributes` are further attributes of its Setting."""
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
    """Return what is printed instead of a secret."""
    return "…"


def joined(words: Iterable[str], last: str) -> str:
    """Return `words` as a list in a sentence, with `last` before the last."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def unset_wait() -> str:
    """Return how long each policy waits if nothing is configured, for the help."""
    policies_by_wait: dict[str, list[str]] = {}
    for name, policy in POLICIES.items():
        if not policy.own_waits:
            wait = "none" if math.isinf(policy.wait) else f"{policy.wait * 1000:g}"
            policies_by_wait.setdefault(wait, []).append(name)
    return ", ".join(f"{wait} for {joined(names, 'and')}" for wait, names in sorted(policies_by_wait.items()))
