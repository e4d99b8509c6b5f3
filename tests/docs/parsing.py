"""Commands that are only parsed: `headway` by its own command line, anything else by the shell."""

import re
import shlex
import subprocess
from typing import Any

import click

from headway.cli import program
from headway.config import FIELDS, load

_ASSIGNED = re.compile(r"^\w+=")
_STOPS = frozenset(("&", "|", ";", "&&", ">", "2>", ">>", "2>>"))


def parse(text: str) -> None:
    """Raise an error if a command has an unknown flag, an invalid value for a setting, or invalid shell syntax."""
    words = shlex.split(text, comments=True)
    while words and _ASSIGNED.match(words[0]):
        words.pop(0)
    if words[:1] != ["headway"]:
        subprocess.run(["bash", "-n", "-c", text], check=True, capture_output=True, timeout=30)
        return
    parse_headway(words[1 : next((at for at, word in enumerate(words) if word in _STOPS), len(words))])


def parse_headway(arguments: list[str]) -> None:
    context = _context(arguments)
    load({name: value for name, value in context.params.items() if name in FIELDS}, environ={})


def unknown_flags(arguments: list[str]) -> set[str]:
    """Return the flags in the arguments of `headway` that the command doesn't have."""
    named = [word for word in arguments if word.startswith("--")]
    command = _context([word for word in arguments if word not in named], resilient=True).command
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {flag.partition("=")[0] for flag in named} - known


def _context(arguments: list[str], resilient: bool = False) -> Any:
    """Return the context of the innermost command in the arguments."""
    context: Any = program.make_context("headway", list(arguments), resilient_parsing=resilient)
    while isinstance(group := context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        command = group.get_command(context, rest[0]) if rest else None
        if command is None:
            break
        context = command.make_context(rest[0], rest[1:], parent=context, resilient_parsing=resilient)
    return context
