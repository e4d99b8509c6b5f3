"""Header fields for a remote API: text of one `Name: value` a line. Empty lines, and those that begin with #, are passed over.

They may be credentials. So no message quotes any of them.
"""

from __future__ import annotations

import re

HINT = "Write one field a line, for example Authorization: Bearer …"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?")
_OURS = frozenset((
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "x-request-timeout-ms",
))  # fmt: skip
"""Fields that are set by what is sent, or by the connection."""


class BadHeaders(ValueError):
    """The text is none of header fields. Says in which line."""


def read(text: str) -> dict[str, str]:
    """Header fields of a text.

    Raises:
        BadHeaders: a line is none, or a field is there twice or not for others to set.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value.strip(" \t")):
            raise BadHeaders(f"has no header field in line {number}")
        if name.lower() in _OURS:
            raise BadHeaders(f"sets {name.lower()} in line {number}, which Headway sets")
        if name.lower() in map(str.lower, found):
            raise BadHeaders(f"has a field twice, again in line {number}")
        found[name] = value.strip(" \t")
    return found
