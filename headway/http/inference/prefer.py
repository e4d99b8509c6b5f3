"""What a client would like but does not insist on: the `Prefer` header (RFC 7240), as far as it is heeded here."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREFERENCE = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SECONDS = re.compile(rb"[0-9]{1,30}")


@dataclass(frozen=True, slots=True)
class Wish:
    """The client will take the id of a task for an answer.

    Attributes:
        wait: seconds for which it would rather wait for the answer itself; 0: not at all.
        applied: value of `Preference-Applied`.
    """

    wait: float
    applied: bytes


def read_prefer(value: bytes) -> Wish | None:
    """Read `respond-async` and `wait` in the value of `Prefer`, several lines of it joined by commas. Whatever else is
    there, or is malformed, is passed over; of a preference that is there twice the first counts. None: the answer is
    to come as ever."""
    preferences: dict[bytes, bytes] = {}
    for preference in _PREFERENCE.findall(value):
        name, _, word = preference.partition(b";")[0].partition(b"=")
        preferences.setdefault(name.strip().lower(), word.strip().strip(b'"'))
    if preferences.get(b"respond-async") != b"":
        return None
    wait = preferences.get(b"wait", b"")
    if _SECONDS.fullmatch(wait) is None:
        return Wish(0.0, b"respond-async")
    return Wish(float(wait), b"respond-async, wait=%d" % int(wait))
