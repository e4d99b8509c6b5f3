"""Sessions of browsers that have signed in with the service token, and the limit on wrong tokens.

A session is a random text in a cookie that no script can read (`HttpOnly`) and no other site's page sends
(`SameSite=Strict`). The process keeps the SHA-256 of it in memory: signing out ends it wherever the cookie went, and a
process that starts anew knows none. The cookie's name has the port in it, as browsers share cookies between the ports of
a host.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable

from headway.core.excerpt import excerpt

LIFETIME = 12 * 3600.0
"""Seconds after which a browser has to sign in again."""
MOST = 256
"""Most sessions; the oldest makes room for a new one."""
TRIES = 5
"""Wrong tokens in a row from one address before it has to wait."""
PAUSE = 10.0
"""Seconds until that address gets one more try."""
TRIES_OF_ALL = 50
"""Wrong tokens in a row from all addresses together before everybody has to wait."""
PAUSE_OF_ALL = 1.0
"""Seconds until there is one more try for all."""
_ADDRESSES = 1024
"""Most addresses whose tries are counted; those that were counted last stay."""
_KNOWN = 256
"""Most addresses that are known to have had a right token; those that had it last stay."""


class Sessions:
    """Sessions of one process.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: OrderedDict[bytes, float] = OrderedDict()
        """End of each session in monotonic seconds, by the SHA-256 of its text, oldest first."""

    def begin(self) -> str:
        """Begin a session, and return its text."""
        text = secrets.token_urlsafe(32)
        while len(self._ends) >= MOST:
            self._ends.popitem(last=False)
        self._ends[_digest(text)] = self._clock() + LIFETIME
        return text

    def valid(self, text: str) -> bool:
        """Whether a text is that of a session that has not ended."""
        end = self._ends.get(_digest(text))
        return end is not None and self._clock() < end

    def end(self, text: str) -> None:
        """End a session; nothing happens when there is none."""
        self._ends.pop(_digest(text), None)


class Tries:
    """Limit on wrong tokens, for each address and for all together.

    It is there for tokens that can be guessed, and must not keep out who has a right one because of others. So a token that
    cannot be guessed is taken at any time, and any other at any time from an address that has had a right one before.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = 0.0
        self._of: OrderedDict[str, float] = OrderedDict()
        """Instant from which an address has all its tries again, by address."""
        self._known: OrderedDict[str, None] = OrderedDict()

    def check(self, address: str, *, right: bool, guessable: bool) -> float:
        """Count a token that an address sends. Returns the seconds until it may try again; 0 where the token counts.

        Arguments:
            address: address of the client.
            right: whether the token is right.
            guessable: whether the right one can be guessed.
        """
        wait = self.wait(address)
        if right and not (wait and guessable and address not in self._known):
            self._passed(address)
            return 0.0
        if not wait:
            self.failed(address)
        return wait

    def wait(self, address: str) -> float:
        """Seconds until an address may try; 0 where it may now."""
        now = self._clock()
        own = self._of.get(address, now) - now - (TRIES - 1) * PAUSE
        everybody = self._all - now - (TRIES_OF_ALL - 1) * PAUSE_OF_ALL
        return max(own, everybody, 0.0)

    def failed(self, address: str) -> None:
        """Count a wrong token."""
        now = self._clock()
        self._all = max(self._all, now) + PAUSE_OF_ALL
        self._of[address] = max(self._of.pop(address, now), now) + PAUSE
        while len(self._of) > _ADDRESSES:
            self._of.popitem(last=False)

    def _passed(self, address: str) -> None:
        """Forget the wrong tokens of an address, and remember that it had a right one."""
        self._of.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def cookie_name(host: str) -> str:
    """Name of the session cookie of a port, by the Host header under which a browser asks it."""
    port = host.rpartition(":")[2]
    return f"headway-session-{port}" if port.isascii() and port.isdigit() else "headway-session"


def cookie_of(header: str, name: str) -> str:
    """Value of a cookie in a Cookie header; empty where there is none."""
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def set_cookie(name: str, value: str, secure: bool) -> str:
    """Set-Cookie header of a session; an empty value takes the cookie away."""
    age = f"{LIFETIME:.0f}" if value else "0"
    return f"{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"


def shown_address(client: object) -> str:
    """Address of a client for the log and for counting its tries, out of an ASGI scope's `client`."""
    return excerpt(str(client[0])) if isinstance(client, tuple | list) and client else ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
