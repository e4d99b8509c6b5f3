"""Programs of the machine, by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def found(name: str) -> str:
    """Path of a program on PATH or in an `sbin` beside a `bin` of it, which few users have on theirs; empty: there is none."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    beside = [str(Path(folder).parent / "sbin") for folder in folders if Path(folder).name == "bin"]
    return shutil.which(name, path=os.pathsep.join([*folders, *beside])) or ""
