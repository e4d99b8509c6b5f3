"""Preferences of a client: the `Prefer` header (RFC 7240), as far as Headway heeds it."""

from __future__ import annotations

import re

import msgspec

_PREFERENCE = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SECONDS = re.compile(rb"[0-9]{1,30}")


class Wish(msgspec.Struct, frozen=True):
    """Wish of a client that accepts the id of a task for an answer.

    Attributes:
        wait: seconds for which it would rather wait for the answer itself; 0: not at all.
        applied: value of `Preference-Applied`.
    """

    wait: float
    applied: bytes


def read_prefer(value: bytes) -> Wish | None:
    """Read `respond-async` and `wait` in the value of `Prefer`, several lines of it joined by commas.

    Other preferences, and malformed ones, are passed over; of a preference that is there twice the first counts. None:
    the client waits for the answer.
    """
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
