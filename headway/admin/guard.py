"""Guard of the admin port: who may ask, by which name, and from which page.

Everything but `/livez`, `/readyz` and `/healthz` is guarded:

    token in the address     refused, as addresses end in logs and histories
    client's key             refused: it is good on the public port only
    name in `Host`           loopback, an IP address, or one of `admin_names`; without a service token loopback only. A
                             web page that has its own name resolve to this machine (DNS rebinding) is turned away so
    page of another site     changes nothing: browsers say where a page is from, and pages cannot keep them from it
    credential               the service token, or the session of a browser that has signed in with it; none where no
                             token is set, as the port listens on loopback only then
    wrong Authorization      is limited by address and logged, as a wrong sign-in is; see `sessions.Tries`

The dashboard's own files hold nothing secret and need no credential, or nobody could sign in.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import parse_qsl

from headway import errors
from headway.admin.sessions import Sessions, Tries, cookie_name, cookie_of, shown_address
from headway.config import is_loopback
from headway.core.excerpt import excerpt
from headway.http.requests import Handler, Request, RouteAnswer, refusal
from headway.identity.api_keys.credential import LIVE
from headway.model import Failure
from headway.runtime.logger import get_logger

log = get_logger(__name__)

_OPEN = ("/livez", "/readyz", "/healthz")
_EARLY = (*_OPEN, "/metrics", "/internal/health", "/internal/workers")
"""Routes that answer while the process starts, besides the dashboard's."""
_PAGES = "/dashboard"
_SAFE = ("GET", "HEAD", "OPTIONS")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_LONG, _VARIED = 32, 10
"""Least characters, and different ones among them, of a token that nobody guesses; those that Headway makes have more."""
_TELLTALE = frozenset(("token", "access_token", "admin_token", "service_token", "authorization", "bearer", "api_key"))
"""Names of query parameters in which people send tokens."""


class ServiceTokens:
    """Service tokens of a process: none, one, or two while it is being rotated.

    Arguments:
        text: setting `admin_token`.

    Attributes:
        guessable: whether one of them could be found by trying.
    """

    def __init__(self, text: str) -> None:
        self._tokens = [token.encode() for token in text.split(",") if token]
        self.guessable = any(len(token) < _LONG or len(set(token)) < _VARIED for token in self._tokens)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def match(self, credential: bytes) -> bool:
        """Whether a credential is one of them; every comparison takes the same time."""
        return any([hmac.compare_digest(credential, token) for token in self._tokens])  # noqa: C419 - all are compared


class Guard:
    """Guard before the admin routes.

    Arguments:
        router: answers what passes.
        tokens: the service tokens.
        names: names besides loopback and IP addresses by which the port may be asked.
        sessions: sessions of browsers that have signed in.
        tries: limit on wrong credentials in the header.
        starting: whether the process has not come up yet.
    """

    def __init__(
        self,
        router: Handler,
        tokens: ServiceTokens,
        names: Iterable[str],
        sessions: Sessions,
        tries: Tries,
        starting: Callable[[], bool],
    ) -> None:
        self._router = router
        self._tokens = tokens
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._sessions, self._tries = sessions, tries
        self._starting = starting

    async def __call__(self, request: Request) -> RouteAnswer:
        """Pass a request on, or refuse it."""
        path = request.path
        if path not in _OPEN:
            refused = self._refusal(request)
            if refused is None and self._starting() and path not in _EARLY and not _is_page(path):
                message = "this process is starting; ask again when /readyz says 200"
                refused = refusal(request.id, Failure(errors.NO_WORKERS, message))
            if refused is not None:
                return refused
        return await self._router(request)

    def _refusal(self, request: Request) -> RouteAnswer | None:
        id, headers = request.id, request.headers
        host = headers.get("host", "")
        if any(name.lower() in _TELLTALE for name, _ in parse_qsl(request.raw_query)):
            message = (
                "no credential is read from an address, which logs and histories keep: send the service token as "
                "Authorization: Bearer …, or sign in at /dashboard; and change a token that was sent like this"
            )
            return refusal(id, Failure(errors.BAD_REQUEST, message))
        credential = _bearer(headers)
        if credential.startswith(LIVE):
            message = "this is a client's key, which is good on the public port only: send the service token"
            return refusal(id, Failure(errors.FORBIDDEN, message))
        if strange := self._stranger(host):
            return refusal(id, Failure(errors.FORBIDDEN, strange))
        foreign = _foreign(headers, host)
        if foreign and request.method not in _SAFE:
            message = "nothing is changed for a page of another site: the request's Sec-Fetch-Site or Origin names one"
            return refusal(id, Failure(errors.FORBIDDEN, message))
        if not self._tokens or _is_page(request.path):
            return None
        session = cookie_of(headers.get("cookie", ""), cookie_name(host))
        if session and not foreign and self._sessions.valid(session):
            request.session = session
            return None
        if headers.get("authorization", "").strip().partition(" ")[2]:  # A scheme by itself guesses nothing.
            address, right = shown_address(request.client), self._tokens.match(credential)
            if wait := self._tries.check(address, right=right, guessable=self._tokens.guessable):
                return too_many_tries(id, wait)
            if right:
                return None
            log.warning("a wrong service token was sent", address=address, path=request.path[:100])
        message = (
            "this route needs the service token: Authorization: Bearer …, or a browser that signed in at /dashboard"
        )
        return refusal(id, Failure(errors.UNAUTHENTICATED, message))

    def _stranger(self, header: str) -> str:
        """Reason for which a request is not answered under its Host header; empty where it is."""
        host = _host(header)
        if is_loopback(host):
            return ""
        if not self._tokens:
            return "without a service token this port answers to 127.0.0.1 and localhost only; set HEADWAY_ADMIN_TOKEN"
        if _is_address(host) or (host and host.lower().rstrip(".") in self._names):
            return ""
        return (
            f"this port answers to loopback, IP addresses and the names in --admin-names, and was asked as "
            f"{excerpt(header)!r}; set HEADWAY_ADMIN_NAMES if that is its name"
        )


def too_many_tries(id: str, wait: float) -> RouteAnswer:
    """Refusal of a credential from where too many wrong ones came. `wait`: seconds until the next try."""
    seconds = math.ceil(wait)
    message = f"too many wrong tokens; the next try is in {seconds} s"
    return refusal(id, Failure(errors.RATE_LIMITED, message, float(seconds), "sign_in"))


def _bearer(headers: Mapping[str, str]) -> bytes:
    scheme, _, text = headers.get("authorization", "").partition(" ")
    return text.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _is_page(path: str) -> bool:
    """Whether a path is one of the dashboard's own files, or its sign-in, or leads there."""
    return path in ("/", _PAGES) or path.startswith(_PAGES + "/")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host(header: str) -> str:
    """Host in a Host header, without its port; empty when that is no host."""
    found = _AUTHORITY.fullmatch(header)
    return found[1].strip("[]") if found is not None else ""


def _foreign(headers: Mapping[str, str], host: str) -> bool:
    """Whether a browser asks for a page from elsewhere than `host`. Other clients send nothing that says so."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")
