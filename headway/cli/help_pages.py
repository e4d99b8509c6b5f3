"""Import of what prints the help, without what no help here uses.

Typer's module for it also imports what shows Markdown and tracebacks, and with them parsers of Markdown and of Python. That is
half of the time that the import takes, and none of it shows in a help.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from types import ModuleType
from typing import Any

_UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""Class that Typer imports from each module, and does not use: help texts are Rich's markup, tracebacks are plain."""


ALL = "--help-all"
"""Option that asks for the help with all settings."""
MANY = 40
"""Options of a command from which on its help shows the common ones."""
COMMON = frozenset((
    "host", "port", "admin_port", "grpc_port", "model", "default_model", "workers", "devices", "max_batch_size", "max_wait_ms",
    "gpu_timeout_ms", "queue_timeout_ms", "request_timeout_ms", "broker", "fallback", "keys", "ledger", "cache", "remote_format",
    "remote_model", "remote_token", "cors_origins", "tls_cert", "reload", "log_level",
))  # fmt: skip
"""Settings that the short help shows."""


def asks(args: Sequence[str]) -> bool:
    """Whether a command line asks for the help with all settings."""
    return ALL in args and "--" not in args[: args.index(ALL)]


def shorten(command: Any, settings: Container[str], name: str) -> None:
    """Hide the rarer settings of a command with many options in its help, and say how to see them.

    Arguments:
        command: the command.
        settings: names of all settings.
        name: name of the command.
    """
    rare = [one for one in command.params if one.name in settings and one.name not in COMMON]
    for parameter in rare:
        parameter.hidden = True
    command.epilog = f"{len(rare)} more settings: headway {name} {ALL}"


def import_printer() -> None:
    """Import Typer's printer of the help. Whoever imports one of those modules later gets the real one."""
    absent = [name for name in _UNUSED if name not in sys.modules]
    for name in absent:
        module = ModuleType(name)
        setattr(module, _UNUSED[name], type(_UNUSED[name], (), {}))
        sys.modules[name] = module
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]
