"""The code of a target: its Python files, and a digest that changes with them."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.config.target import FileTarget, ModuleTarget, RemoteTarget, Target
from headway.runtime.shared_files import python_files, stamp


def source_folder(target: Target) -> Path | None:
    """Return the folder of the user's own target file or package, or None for an installed or remote target."""
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
    """Return the first 12 hexadecimal digits of a SHA-256 over the target's name and the Python files in and below its folder.
    This reads all these files, which may take a while. With `stamps` it covers their write times, too."""
    match target:
        case FileTarget():
            parts: list[str | bytes] = [target.path.name, target.attribute, target.arguments]
        case ModuleTarget():
            parts = [f"{target.module}:{target.attribute}", target.arguments]
        case RemoteTarget():
            parts = [target.url]
        case _:  # An observed target has no code that is known here.
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
    """Return the names, relative to the folder, and contents of the readable files."""
    parts: list[str | bytes] = []
    for file in sorted(files):
        with contextlib.suppress(OSError):
            parts += str(file.relative_to(folder)), file.read_bytes()
            parts += [str(stamp(file))] if stamps else []
    return parts


def _installed(package: str) -> tuple[Path, Sequence[Path]]:
    """Return the folder and files of an installed package or single-file module."""
    for entry in sys.path:
        path = Path(entry, package)
        if path.is_dir():
            return path, python_files(path)
        if (file := path.with_suffix(".py")).is_file():
            return file.parent, [file]
    return Path(), []
