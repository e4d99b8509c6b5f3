import os
import shutil
from pathlib import Path


def found(name: str) -> str:
    """Return the path of a program, or an empty string. Also looks in the `sbin` beside each `bin` of PATH, where Debian has daemons."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    beside = [str(Path(folder).parent / "sbin") for folder in folders if Path(folder).name == "bin"]
    return shutil.which(name, path=os.pathsep.join([*folders, *beside])) or ""
