"""Guard of the admin port: who may use it, under which name, and from which page.

Everything but `/livez`, `/readyz` and `/healthz` is guarded:

    token in the URL         refused, because URLs end up in logs and histories
    client's key             refused: it is only for the public port
    name in `Host`           loopback, an IP address, or one of `admin_names`; without a service token only loopback. This
                             stops web pages whose own name resolves to this machine (DNS rebinding)
    page of another site     may change nothing: browsers say where a page is from, and pages cannot forge that
    credential               the service token, or the session of a browser that has signed in with it. None is needed if no
                             token is set, since the port then listens on loopback only
    wrong Authorization      limited by address and logged, as wrong sign-ins are; see `sessions.Tries`

The dashboard's own files are not secret and need no credential, because nobody could sign in otherwise.
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
"""Routes, besides the dashboard's, that answer while the process starts."""
_PAGES = "/dashboard"
_SAFE = ("GET", "HEAD", "OPTIONS")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_LONG, _VARIED = 32, 10
"""Minimum length, and minimum number of different characters, of a token that nobody can guess. Headway's own have more."""
_TELLTALE = frozenset(("token", "access_token", "admin_token", "service_token", "authorization", "bearer", "api_key"))


class ServiceTokens:
    """Service tokens of a process: none, one, or two during a rotation. `text` is the setting `admin_token`. `guessable` is True
    if trial and error could find a token."""

    def __init__(self, text: str) -> None:
        self._tokens = [token.encode() for token in text.split(",") if token]
        self.guessable = any(len(token) < _LONG or len(set(token)) < _VARIED for token in self._tokens)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def match(self, credential: bytes) -> bool:
        """Return True if a credential is one of the tokens, in constant time."""
        return any([hmac.compare_digest(credential, token) for token in self._tokens])  # noqa: C419 - compare with all


class Guard:
    """Guard before the admin routes. `router` answers the requests that pass. The port may be used under `names`, loopback and IP
    addresses. `starting` returns True until the process is up."""

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
        scheme, _, text = headers.get("authorization", "").partition(" ")
        credential = text.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if credential.startswith(LIVE):
            message = "this is a client's key, which is good on the public port only: send the service token"
            return refusal(id, Failure(errors.FORBIDDEN, message))
        if problem := self._host_problem(host):
            return refusal(id, Failure(errors.FORBIDDEN, problem))
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
        if headers.get("authorization", "").strip().partition(" ")[2]:  # A scheme alone is no guess.
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

    def _host_problem(self, header: str) -> str:
        """Return why a request with this Host header is refused, or empty if it isn't."""
        match = _AUTHORITY.fullmatch(header)
        host = match[1].strip("[]") if match is not None else ""
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
    """Refuse a credential from an address that has sent too many wrong ones. The next try is in `wait` seconds."""
    seconds = math.ceil(wait)
    message = f"too many wrong tokens; the next try is in {seconds} s"
    return refusal(id, Failure(errors.RATE_LIMITED, message, float(seconds), "sign_in"))


def _is_page(path: str) -> bool:
    """Return True for the path of the dashboard's own files or its sign-in, or a path that leads there."""
    return path in ("/", _PAGES) or path.startswith(_PAGES + "/")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _foreign(headers: Mapping[str, str], host: str) -> bool:
    """Return True if a browser sends a request for a page from elsewhere than `host`. Other clients don't say."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")
