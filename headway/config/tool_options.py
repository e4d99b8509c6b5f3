"""Options of tools, such as `headway simulate`, declared at the fields that they set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any

import msgspec

from headway.config.fields import outside
from headway.errors import SettingError


class ToolOption(msgspec.Struct, frozen=True, kw_only=True):
    """Option that sets a field of what a tool runs.

    Attributes:
        metavar: stands for its value in the help.
        group: heading that it is listed under.
        type: type of its value; str if the tool parses the text.
        default: value if none is given, in the option's unit.
        unit: the option's unit, for errors.
        per: how many of the option's units make one of the field's, such as 1000 for ms of a field in seconds.
        within: bounds of its value, both allowed; None if it has none or the tool checks them.
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
        """Convert the option's value to the field's."""
        return value if value is None or self.per == 1.0 else value / self.per


def tool_option(
    default: Any, flag: str, metavar: str, group: str, help: str, *, repr: bool = True, default_factory: Any = MISSING,
    **attributes: Any,
) -> Any:  # fmt: skip
    """Return a field with a ToolOption, which has these further attributes. Pass `dataclasses.MISSING` for no default."""
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
    """Check that fields of a dataclass are within the bounds of their options. Raises SettingError."""
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
