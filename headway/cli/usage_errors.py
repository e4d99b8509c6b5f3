"""Errors of the parser that name which commands take what another was given; imported where there is one, as it takes all settings."""

from __future__ import annotations

import re

import click

from headway.app.roles import ROLES
from headway.config import FIELDS, flag

_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")


def better_error(error: click.UsageError, command: str | None) -> click.UsageError:
    """Error of the parser that names who takes what a role does not, an option or a target; the same one where nobody does.

    Arguments:
        error: the error.
        command: name of the command that was called.
    """
    role = next((role for role in ROLES if role.value == command), None)
    if role is None:
        return error
    if isinstance(error, click.NoSuchOption):
        takers = takers_of(error.option_name)
        if not takers or command in takers:
            return error
        named = " and ".join(filter(None, (", ".join(takers[:-1]), takers[-1])))
        message = f"headway {command} has no {error.option_name}: it is a flag of headway {named}."
    elif not ROLES[role].batchers and (found := _EXTRA.fullmatch(error.message)):
        message = (
            f"headway {command} takes no TARGET, and was given {found[1]}: workers run it. Start headway worker {found[1]} "
            f"beside it with the same --broker, or all in one process: headway serve {found[1]}"
        )
    else:
        return error
    return click.UsageError(message, error.ctx)


def takers_of(option: str) -> list[str]:
    """Commands of the roles that take an option."""
    name = next((name for name in FIELDS if option in (flag(name), f"--no-{flag(name)[2:]}")), "")
    if not name:
        return []
    return [role.value for role, parts in ROLES.items() if name in parts.settings]
