"""The code of a target: the Python files that it may be made of, and the digest that tells it from other code."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.config.target import FileTarget, ModuleTarget, RemoteTarget, Target
from headway.runtime.file_watcher import python_files, stamp


def source_folder(target: Target) -> Path | None:
    """Folder of the file or package of a target, if it is the user's own: it is in no folder of installed packages."""
    match target:
        case FileTarget():
            return target.path.parent
        case ModuleTarget():
            package = Path(target.folder, target.module.partition(".")[0])
            if package.is_dir():
                return package
            return package.parent if package.with_suffix(".py").is_file() else None
        case _:
            return None


def target_digest(target: Target, *, stamps: bool = False) -> str:
    """First 12 hexadecimal digits of SHA-256 over what a target is named, and over the Python files in its folder and below.

    It reads these files, which may take a while. `stamps`: whether a file counts as another once it has been written anew.
    """
    match target:
        case FileTarget():
            parts: list[str | bytes] = [target.path.name, target.attribute, target.arguments]
        case ModuleTarget():
            parts = [f"{target.module}:{target.attribute}", target.arguments]
        case RemoteTarget():
            parts = [target.url]
        case _:  # Of one that is only observed nothing is known here.
            return ""
    folder = source_folder(target)
    if folder is not None:
        parts += _content(folder, python_files(folder), stamps)
    elif isinstance(target, ModuleTarget):
        folder, files = _installed(target.module.partition(".")[0])
        parts += _content(folder, files, stamps)
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
    return hashed.hexdigest()[:12]


def _content(folder: Path, files: Sequence[Path], stamps: bool) -> list[str | bytes]:
    """Names below a folder, and contents, of the files in it that can be read."""
    parts: list[str | bytes] = []
    for file in sorted(files):
        with contextlib.suppress(OSError):
            parts += str(file.relative_to(folder)), file.read_bytes()
            parts += [str(stamp(file))] if stamps else []
    return parts


def _installed(package: str) -> tuple[Path, Sequence[Path]]:
    """Folder of an installed package, and its files; or that of a module, and its file."""
    for entry in sys.path:
        place = Path(entry, package)
        if place.is_dir():
            return place, python_files(place)
        if (file := place.with_suffix(".py")).is_file():
            return file.parent, [file]
    return Path(), []
