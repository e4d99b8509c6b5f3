"""Guard of the admin port, which checks the caller, the host name used to reach the port, and the page that sent the request.

It checks requests to all routes except `/livez`, `/readyz` and `/healthz`:

    token in the URL         refused, because URLs end up in logs and histories
    client's key             refused, because it is only for the public port
    name in `Host`           must be loopback, an IP address, or one of `admin_names`; only loopback if there is no service
                             token. This stops web pages whose own name resolves to this machine (DNS rebinding)
    page of another site     can't change anything: browsers send a page's site, and a page can't forge it
    credential               must be the service token, or the session of a browser that has signed in. Without a service
                             token, no credential is needed, and the port listens on loopback only
    wrong Authorization      limited by address and logged, like failed sign-ins; see `Tries`

The dashboard's files aren't secret, and need no credential, because otherwise nobody could sign in."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import parse_qsl

from headway import errors
from headway.config import is_loopback
from headway.core.excerpt import excerpt
from headway.http.routing import Handler, Request, RouteAnswer, refusal
from headway.identity.api_keys.credential import LIVE
from headway.model import Failure
from headway.runtime.logger import get_logger

log = get_logger(__name__)

LIFETIME = 12 * 3600.0  # Seconds after which a browser has to sign in again.
MOST = 256  # Maximum number of sessions. The oldest is dropped to make room for a new one.
TRIES = 5  # Number of wrong tokens in a row from one address, after which it must wait.
PAUSE = 10.0  # Seconds until that address gets another try.
TRIES_OF_ALL = 50  # Number of wrong tokens in a row from all addresses, after which everyone must wait.
PAUSE_OF_ALL = 1.0  # Seconds until everyone gets another try.
_ADDRESSES = 1024  # Maximum number of addresses whose attempts are counted. The least recent are forgotten.
_KNOWN = 256  # Maximum number of addresses known to have sent the right token. The least recent are forgotten.


class Sessions:
    """Sessions of browsers that have signed in with the service token. `clock` returns monotonic seconds.

    A session is a random string in a cookie. Scripts can't read the cookie (`HttpOnly`), and pages of other sites don't send it
    (`SameSite=Strict`). The process only keeps the string's SHA-256, in memory. So signing out also invalidates copies of the
    cookie, and a restart ends all sessions. The cookie's name contains the port, because the ports of a host share cookies."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: OrderedDict[bytes, float] = OrderedDict()  # By the SHA-256 of each session, oldest first.

    def begin(self) -> str:
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
    """Limit on wrong tokens per address and in total, against guessing. `clock` returns monotonic seconds. Nobody can lock out
    the owner of the right token: that token is always accepted if it can't be guessed, or if the address has sent it before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = 0.0
        self._of: OrderedDict[str, float] = OrderedDict()  # When each address has all its attempts again.
        self._known: OrderedDict[str, None] = OrderedDict()

    def check(self, address: str, *, right: bool, guessable: bool) -> float:
        """Count an attempt from an address, with the `right` token or a wrong one. `guessable` is True if the right token could
        be guessed. Return 0 if the token may be used, or else the seconds until the next attempt."""
        wait = self.wait(address)
        if right and not (wait and guessable and address not in self._known):
            self._passed(address)
            return 0.0
        if not wait:
            self.failed(address)
        return wait

    def wait(self, address: str) -> float:
        """Return the seconds until an address may try again."""
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
        """Forget the wrong tokens of an address, and remember that it has sent the right one."""
        self._of.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def cookie_name(host: str) -> str:
    """Return the name of the session cookie for the port in a Host header."""
    port = host.rpartition(":")[2]
    return f"headway-session-{port}" if port.isascii() and port.isdigit() else "headway-session"


def cookie_of(header: str, name: str) -> str:
    """Return the value of a cookie in a Cookie header, or an empty string."""
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def set_cookie(name: str, value: str, secure: bool) -> str:
    """Return the Set-Cookie header for a session. An empty value removes the cookie."""
    age = f"{LIFETIME:.0f}" if value else "0"
    return f"{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"


def shown_address(client: object) -> str:
    """Return a client's address for the log and for counting its attempts, from an ASGI scope's `client`."""
    return excerpt(str(client[0])) if isinstance(client, tuple | list) and client else ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


_OPEN = ("/livez", "/readyz", "/healthz")
_EARLY = (*_OPEN, "/metrics", "/internal/health", "/internal/workers")  # Routes that work while the process starts.
_PAGES = "/dashboard"
_SAFE = ("GET", "HEAD", "OPTIONS")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_LONG, _VARIED = 32, 10  # Minimum length, and minimum number of different characters, of an unguessable token.
_TELLTALE = frozenset(("token", "access_token", "admin_token", "service_token", "authorization", "bearer", "api_key"))


class ServiceTokens:
    """Service tokens in `admin_token`: at most one, or two during a rotation. `guessable` is True if one can be guessed."""

    def __init__(self, text: str) -> None:
        self._tokens = [token.encode() for token in text.split(",") if token]
        self.guessable = any(len(token) < _LONG or len(set(token)) < _VARIED for token in self._tokens)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def match(self, credential: bytes) -> bool:
        """Return True if a credential is one of the tokens. The comparison takes constant time."""
        return any([hmac.compare_digest(credential, token) for token in self._tokens])  # noqa: C419 - compare with all


class Guard:
    """Checks requests to `router`. `names` are the port's host names. `starting` returns True while the process starts."""

    def __init__(
        self,
        router: Handler,
        tokens: ServiceTokens,
        names: Iterable[str],
        sessions: Sessions,
        tries: Tries,
        starting: Callable[[], bool],
    ) -> None:
        self._router, self._tokens = router, tokens
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._sessions, self._tries = sessions, tries
        self._starting = starting

    async def __call__(self, request: Request) -> RouteAnswer:
        path = request.path
        if path not in _OPEN:
            refused = self._refusal(request)
            if refused is None and self._starting() and path not in _EARLY and not _is_page(path):
                message = "this process is starting; try again when /readyz returns 200"
                refused = refusal(request.id, Failure(errors.NO_WORKERS, message))
            if refused is not None:
                return refused
        return await self._router(request)

    def _refusal(self, request: Request) -> RouteAnswer | None:
        id, headers = request.id, request.headers
        host = headers.get("host", "")
        if any(name.lower() in _TELLTALE for name, _ in parse_qsl(request.raw_query)):
            message = (
                "credentials in a URL are refused, because URLs end up in logs and histories: send the service token as "
                "Authorization: Bearer …, or sign in at /dashboard; replace any token that was sent like this"
            )
            return refusal(id, Failure(errors.BAD_REQUEST, message))
        scheme, _, text = headers.get("authorization", "").partition(" ")
        credential = text.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if credential.startswith(LIVE):
            message = "this is a client's key, which is only valid on the public port: send the service token"
            return refusal(id, Failure(errors.FORBIDDEN, message))
        if problem := self._host_problem(host):
            return refusal(id, Failure(errors.FORBIDDEN, problem))
        foreign = _foreign(headers, host)
        if foreign and request.method not in _SAFE:
            message = "a page of another site can't change anything, and Sec-Fetch-Site or Origin names one"
            return refusal(id, Failure(errors.FORBIDDEN, message))
        if not self._tokens or _is_page(request.path):
            return None
        session = cookie_of(headers.get("cookie", ""), cookie_name(host))
        if session and not foreign and self._sessions.valid(session):
            request.session = session
            return None
        if headers.get("authorization", "").strip().partition(" ")[2]:  # A scheme without a token isn't an attempt.
            address, right = shown_address(request.client), self._tokens.match(credential)
            if wait := self._tries.check(address, right=right, guessable=self._tokens.guessable):
                return too_many_tries(id, wait)
            if right:
                return None
            log.warning("a wrong service token was sent", address=address, path=request.path[:100])
        message = "this route needs the service token: send Authorization: Bearer …, or sign in at /dashboard"
        return refusal(id, Failure(errors.UNAUTHENTICATED, message))

    def _host_problem(self, header: str) -> str:
        """Return why a request with this Host header is refused, or an empty string if it isn't."""
        match = _AUTHORITY.fullmatch(header)
        host = match[1].strip("[]") if match is not None else ""
        if is_loopback(host):
            return ""
        if not self._tokens:
            return "without a service token, this port only answers to 127.0.0.1 and localhost; set HEADWAY_ADMIN_TOKEN"
        if _is_address(host) or (host and host.lower().rstrip(".") in self._names):
            return ""
        return (
            f"this port answers to loopback, IP addresses and the names in --admin-names, but not to "
            f"{excerpt(header)!r}; set HEADWAY_ADMIN_NAMES if that is its name"
        )


def too_many_tries(id: str, wait: float) -> RouteAnswer:
    """Refuse a token after too many wrong ones. The next attempt is allowed in `wait` seconds."""
    seconds = math.ceil(wait)
    message = f"too many wrong tokens; try again in {seconds} s"
    return refusal(id, Failure(errors.RATE_LIMITED, message, float(seconds), "sign_in"))


def _is_page(path: str) -> bool:
    """Return True if a path belongs to the dashboard or its sign-in, or is `/`, which redirects there."""
    return path in ("/", _PAGES) or path.startswith(_PAGES + "/")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _foreign(headers: Mapping[str, str], host: str) -> bool:
    """Return True if a browser sent a request for a page of another site. Other clients don't send these headers."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")
