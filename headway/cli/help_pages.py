"""Import of what prints the help, without what no help here uses.

Typer's module for it also imports what shows Markdown and tracebacks, and with them parsers of Markdown and of Python. That is
half of the time that the import takes, and none of it shows in a help.
"""

from __future__ import annotations

import sys
from types import ModuleType

_UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""Class that Typer imports from each module, and does not use: help texts are Rich's markup, tracebacks are plain."""


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
