"""Credentials for a remote API: header fields that are sent with every request, and never appear in a log or an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from headway.errors import SettingError
from headway.runtime.logger import get_logger
from headway.runtime.shared_files import stamp

log = get_logger(__name__)

HINT = "Write one field per line, for example Authorization: Bearer …"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?")
_OURS = frozenset((  # Fields that Headway sets, because they depend on the body or the connection.
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "x-request-timeout-ms",
))  # fmt: skip


class BadHeaders(ValueError):
    """The text isn't a list of header fields. The message says in which line."""


def read_header_fields(text: str) -> dict[str, str]:
    """Parse lines `Name: value`. Skips empty lines and comments (#). Raises BadHeaders, whose message quotes no values."""
    fields: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value.strip(" \t")):
            raise BadHeaders(f"does not have a header field in line {number}")
        if name.lower() in _OURS:
            raise BadHeaders(f"sets {name.lower()} in line {number}, which only Headway may set")
        if name.lower() in map(str.lower, fields):
            raise BadHeaders(f"repeats a field in line {number}")
        fields[name] = value.strip(" \t")
    return fields


class Credentials:
    """A bearer token, and header fields from a file that is reread when it changes. Raises SettingError if the file is
    invalid or conflicts with the token. If the file becomes invalid later, the log says so once, and the previous fields
    stay in use."""

    def __init__(self, token: str = "", file: str = "") -> None:
        self._fixed = {"Authorization": f"Bearer {token}"} if token else {}
        self._path = Path(file) if file else None
        self._seen: tuple[int, int, int] | None = None
        self._all: Mapping[str, str] = self._fixed
        if self._path is not None:
            self._seen = stamp(self._path)
            try:
                self._all = self._read(self._path)
            except (OSError, UnicodeDecodeError, BadHeaders) as exc:
                raise SettingError("remote_headers_file", file, _reason(exc), HINT) from None

    def __repr__(self) -> str:
        return "Credentials(…)"

    def current(self) -> Mapping[str, str]:
        if self._path is not None and (now := stamp(self._path)) != self._seen:
            self._seen = now
            try:
                self._all = self._read(self._path)
            except (OSError, UnicodeDecodeError, BadHeaders) as exc:
                hint = "The previous fields stay in use."
                log.error("header fields cannot be read", file=str(self._path), reason=_reason(exc), hint=hint)
            else:
                log.info("header fields for the remote API were reread", file=str(self._path))
        return self._all

    def _read(self, path: Path) -> Mapping[str, str]:
        fields = read_header_fields(path.read_text("utf-8"))
        if self._fixed and "authorization" in map(str.lower, fields):
            raise BadHeaders("sets Authorization, but remote_token does too")
        return {**self._fixed, **fields}


def _reason(exc: Exception) -> str:
    if isinstance(exc, BadHeaders):
        return str(exc)
    return f"cannot be read: {exc.strerror}" if isinstance(exc, OSError) else "is not UTF-8"
