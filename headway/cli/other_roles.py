"""Hint for a flag that one role was given and others take."""

from __future__ import annotations

import re
from typing import Any

from headway.app.roles import ROLES
from headway.config import FIELDS, flag


def point_out(error: Any, option: str, command: str | None) -> None:
    """Name in an error of an unknown option the roles that take it.

    Nothing happens if `command` is no role, or takes it itself, or no role does.

    Arguments:
        error: error of the parser, with its `message` and `possibilities`.
        option: option as it was written.
        command: name of the command that does not take it.
    """
    takers = takers_of(option)
    if not takers or command in takers or command not in {role.value for role in ROLES}:
        return
    named = " and ".join(filter(None, (", ".join(takers[:-1]), takers[-1])))
    error.message = f"headway {command} has no {option}: it is a flag of headway {named}."
    error.possibilities = None


def point_out_target(error: Any, command: str | None) -> None:
    """Say in an error of an extra argument who takes a target. Nothing happens if `command` is no role without one."""
    role = next((role for role in ROLES if role.value == command), None)
    found = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", str(error.message))
    if role is None or ROLES[role].batchers or found is None:
        return
    error.message = (
        f"headway {command} takes no TARGET, and was given {found[1]}: workers run it. Start headway worker {found[1]} beside "
        f"it with the same --broker, or all in one process: headway serve {found[1]}"
    )


def takers_of(option: str) -> list[str]:
    """Commands of the roles that take an option."""
    name = next((name for name in FIELDS if option in (flag(name), f"--no-{flag(name)[2:]}")), "")
    if not name or not FIELDS[name].has_flag:
        return []
    return [role.value for role, parts in ROLES.items() if name in parts.settings]
