"""Sessions of browsers that have signed in with the service token, and the limit on wrong tokens.

A session is a random text in a cookie that scripts cannot read (`HttpOnly`) and pages of other sites do not send
(`SameSite=Strict`). The process keeps its SHA-256 in memory, so signing out ends it wherever the cookie was copied to, and a
restarted process knows none. The cookie's name contains the port, because browsers share cookies between the ports of a host.
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
"""Maximum number of sessions. The oldest makes room for a new one."""
TRIES = 5
"""Number of wrong tokens in a row from one address before it must wait."""
PAUSE = 10.0
"""Seconds until that address gets another try."""
TRIES_OF_ALL = 50
"""Number of wrong tokens in a row from all addresses before everybody must wait."""
PAUSE_OF_ALL = 1.0
"""Seconds until everybody gets another try."""
_ADDRESSES = 1024
"""Maximum number of addresses whose tries are counted. The least recent are forgotten."""
_KNOWN = 256
"""Maximum number of addresses known to have sent a right token. The least recent are forgotten."""


class Sessions:
    """Sessions of one process. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # SHA-256 of each session's text to its end in monotonic seconds, oldest first.
        self._ends: OrderedDict[bytes, float] = OrderedDict()

    def begin(self) -> str:
        """Start a session, and return its text."""
        text = secrets.token_urlsafe(32)
        while len(self._ends) >= MOST:
            self._ends.popitem(last=False)
        self._ends[_digest(text)] = self._clock() + LIFETIME
        return text

    def valid(self, text: str) -> bool:
        end = self._ends.get(_digest(text))
        return end is not None and self._clock() < end

    def end(self, text: str) -> None:
        self._ends.pop(_digest(text), None)


class Tries:
    """Limit on wrong tokens, for each address and for all together. `clock` returns monotonic seconds.

    The limit protects tokens that can be guessed, and must not lock out whoever has the right one because of others' tries. So a
    token that cannot be guessed always counts, and any other token always counts from an address that has sent it before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = 0.0
        # Address to the instant when it has all its tries again.
        self._of: OrderedDict[str, float] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    def check(self, address: str, *, right: bool, guessable: bool) -> float:
        """Count a token from an address, and return the seconds until its next try, or 0 if this token counts. `right` is True for
        the right token, and `guessable` if that token can be guessed."""
        wait = self.wait(address)
        if right and not (wait and guessable and address not in self._known):
            self._passed(address)
            return 0.0
        if not wait:
            self.failed(address)
        return wait

    def wait(self, address: str) -> float:
        """Return the seconds until an address may try."""
        now = self._clock()
        own = self._of.get(address, now) - now - (TRIES - 1) * PAUSE
        everybody = self._all - now - (TRIES_OF_ALL - 1) * PAUSE_OF_ALL
        return max(own, everybody, 0.0)

    def failed(self, address: str) -> None:
        now = self._clock()
        self._all = max(self._all, now) + PAUSE_OF_ALL
        self._of[address] = max(self._of.pop(address, now), now) + PAUSE
        while len(self._of) > _ADDRESSES:
            self._of.popitem(last=False)

    def _passed(self, address: str) -> None:
        """Forget an address's wrong tokens, and remember that it sent a right one."""
        self._of.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def cookie_name(host: str) -> str:
    """Return the name of a port's session cookie, given the Host header."""
    port = host.rpartition(":")[2]
    return f"headway-session-{port}" if port.isascii() and port.isdigit() else "headway-session"


def cookie_of(header: str, name: str) -> str:
    """Return the value of a cookie in a Cookie header, or empty."""
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def set_cookie(name: str, value: str, secure: bool) -> str:
    """Return the Set-Cookie header of a session; an empty value removes the cookie."""
    age = f"{LIFETIME:.0f}" if value else "0"
    return f"{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"


def shown_address(client: object) -> str:
    """Return a client's address for the log and for counting its tries, from an ASGI scope's `client`."""
    return excerpt(str(client[0])) if isinstance(client, tuple | list) and client else ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
