"""Options of tools, such as `headway simulate`, at the fields of what the tools run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any

import msgspec

from headway.config.fields import outside
from headway.errors import SettingError


class ToolOption(msgspec.Struct, frozen=True, kw_only=True):
    """Option of a tool, such as `headway simulate`, that sets a field of what the tool runs.

    Attributes:
        flag: how it is spelt.
        metavar: what its help shows in the place of a value.
        group: heading under which it is shown.
        help: sentences that say what it does.
        type: type of its value; a text that is read by the tool has str.
        default: its value where none is given, in its own unit.
        unit: its unit, for errors.
        per: how many of its units the field's unit has: 1000 for ms of a field in seconds.
        within: bounds of its value, both allowed; None: none, or the tool knows.
        multiple: whether it may be given several times.
    """

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
        """Value of the field, from that of the option."""
        return value if value is None or self.per == 1.0 else value / self.per


def tool_option(
    default: Any,
    flag: str,
    metavar: str,
    group: str,
    help: str,
    *,
    repr: bool = True,
    default_factory: Any = MISSING,
    **known: Any,
) -> Any:
    """Field with a ToolOption, of which `known` are further attributes. `dataclasses.MISSING` as its default: it has none, or a factory."""
    usual = default if isinstance(default, int | float | str) else None
    per = known.get("per", 1.0)
    given = usual * per if per != 1.0 and usual is not None else usual
    metadata = {"option": ToolOption(flag=flag, metavar=metavar, group=group, help=help, default=given, **known)}
    made: Any = field(default=default, default_factory=default_factory, repr=repr, metadata=metadata)
    return made


def tool_options_of(kind: Any) -> dict[str, ToolOption]:
    """Options of the fields of a dataclass, by the names of the fields."""
    return {one.name: one.metadata["option"] for one in fields(kind) if "option" in one.metadata}


def check_options(owner: object, names: Iterable[str]) -> None:
    """Check that fields of a dataclass lie within the bounds of their options.

    Raises:
        SettingError: one does not.
    """
    known = tool_options_of(owner)
    for name in names:
        value, one = getattr(owner, name), known[name]
        if one.within is not None and value is not None:
            check_within(one.flag, value * one.per, *one.within, one.unit)


def check_within(flag: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Raise SettingError for a value outside of its bounds, both of which are allowed."""
    if wrong := outside(value, low, high, unit):
        raise SettingError(flag, value, *wrong)
