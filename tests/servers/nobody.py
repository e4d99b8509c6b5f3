"""User of the servers that do not run as root."""

import os
from pathlib import Path
from typing import Any

NOBODY = 65_534


def as_nobody() -> dict[str, Any]:
    """Arguments of a child process that may not run as root."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}


def give(folder: Path) -> None:
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
