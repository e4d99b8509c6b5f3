"""Field of the table of settings: facts of one setting, and the bounds of its value by itself."""

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
    """Parts of a process, of which its role has some."""

    GATEWAY = auto()
    BATCHERS = auto()
    CONTROLLER = auto()


class Own(Enum):
    """Owner of a value: the process, or each model, or each version of one."""

    PROCESS = 0
    MODEL = 1
    VERSION = 2
    """A version of a model, as its workers alone go by it; the model may, too."""


class Term(Enum):
    """Report of a model's value by its workers, as gateways have to know it."""

    NO = 0
    CHANGED = 1
    """If it is not the default."""
    ALWAYS = 2
    """Whatever it is, as the queue must go by those of the workers."""


def outside(value: float, low: float, high: float, unit: str = "") -> tuple[str, str] | None:
    """Fault of a number outside of its bounds, both of which are allowed, and how to mend it; None within."""
    if low <= value <= high:
        return None
    return f"must lie between {low:.15g} and {high:.15g} {unit}".rstrip(), "Choose a value in that range."


class TextForm(msgspec.Struct, frozen=True):
    """Form of a text: the pattern that all of it matches, what a text that does not is told, and a correct one."""

    pattern: str
    reason: str
    hint: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one setting.

    Attributes:
        default: its value where none is given.
        group: heading under which it is shown.
        help: sentences that say what it does.
        unit: unit of its value; empty: it has none.
        within: bounds of a number, both allowed; None: it is none.
        among: texts that it may be; empty: others, too.
        form: form of its text.
        needs: setting without which it does nothing.
        parts: parts of a process that go by it; None: every process does.
        own: who may have a value of its own.
        term: whether workers report it.
        show: turns a text that holds a secret into what may be printed; None: all of it may be.
        common: whether the short help of a command with many settings shows it.
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
        """Fault of a value by itself: why it cannot be taken, and how to mend it; None for one that can be."""
        if self.within is not None and value is not None:
            unit = self.unit.partition(" to ")[0].strip("0123456789")
            if wrong := outside(value, *self.within, unit):
                return wrong
        if self.among and value not in self.among:
            near = nearest(value, self.among)
            meant = f"Did you mean {near[0]}? " if near else ""
            return "is not known", f"{meant}Use {' or '.join(self.among)}."
        if self.form is not None and not re.fullmatch(self.form.pattern, value):
            return self.form.reason, self.form.hint
        return None

    def shown(self, value: object) -> object:
        """`value` as far as it may be printed, if it is meant for this setting."""
        if self.show is None:
            return value
        return self.show(value) if isinstance(value, str) else "…"


def setting(
    default: Any, group: str, help: str, unit: str = "", *, show: Callable[[str], str] | None = None, **known: Any
) -> Any:
    """Field of Settings, of which `known` are further attributes of its Setting."""
    one = Setting(default=default, group=group, help=help, unit=unit, show=show, **known)
    return field(default=default, repr=show is None, metadata={"setting": one})


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
    """Words in the place of a secret."""
    return "…"


def joined(words: Iterable[str], last: str) -> str:
    """`words` as a list in a sentence, with `last` before the last one."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def unset_wait() -> str:
    """Wait of each policy when none is configured; policies of one wait together."""
    named: dict[str, list[str]] = {}
    for name, policy in POLICIES.items():
        if not policy.own_waits:
            named.setdefault("none" if math.isinf(policy.wait) else f"{policy.wait * 1000:g}", []).append(name)
    return ", ".join(f"{wait} for {joined(named[wait], 'and')}" for wait in sorted(named))
