"""Digest of a target: what tells two targets apart that are served under one name and version."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from headway.config.target import FileTarget, ModuleTarget, RemoteTarget, Target


def target_digest(target: Target) -> str:
    """First 12 hexadecimal digits of SHA-256 over what a target is named, and over its file where that can be read.

    What the file imports is not looked at.
    """
    match target:
        case FileTarget():
            parts = target.attribute, target.arguments, _content(target.path)
        case ModuleTarget():
            place = Path(target.folder, *target.module.split("."))
            source = _content(place.with_suffix(".py")) or _content(place / "__init__.py")
            parts = f"{target.module}:{target.attribute}", target.arguments, source
        case RemoteTarget():
            parts = target.url, "", b""
        case _:  # Of one that is only observed nothing is known here.
            return ""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
    return hashed.hexdigest()[:12]


def _content(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
