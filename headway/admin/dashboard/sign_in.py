"""Browser sign-in, which exchanges the service token for a session cookie.

GET     returns whether a session is needed, and whether this browser has one
POST    {"token": …} starts a session; wrong tokens are throttled and logged
DELETE  ends the session on the server, which invalidates all copies of its cookie"""

from __future__ import annotations

import msgspec

from headway.admin import guard
from headway.errors import UNAUTHENTICATED, BadRequest
from headway.http.routing import ClientLeft, Request, Route, RouteAnswer, as_json, refusal
from headway.model import Failure
from headway.runtime.logger import get_logger

log = get_logger(__name__)

LARGEST = 8192  # Maximum body size of a sign-in in bytes. A token has at most 4,096.


class _Body(msgspec.Struct):
    token: str


class SignIn:
    """Sign-in route. If there are no service tokens, no session is needed. If `secure`, browsers send the cookie only over TLS."""

    def __init__(
        self, tokens: guard.ServiceTokens, sessions: guard.Sessions, tries: guard.Tries, *, secure: bool
    ) -> None:
        self._tokens, self._sessions, self._tries, self._secure = tokens, sessions, tries, secure

    def routes(self) -> list[Route]:
        return [Route("/dashboard/session", self.answer, ("GET", "POST", "DELETE"))]

    async def answer(self, request: Request) -> RouteAnswer:
        name = guard.cookie_name(request.headers.get("host", ""))
        session = guard.cookie_of(request.headers.get("cookie", ""), name)
        if request.method == "DELETE":
            self._sessions.end(session)
            response = RouteAnswer(status=204, headers={"set-cookie": guard.set_cookie(name, "", self._secure)})
        elif request.method == "POST":
            response = await self._begin(request, name)
        else:
            signed_in = bool(session) and self._sessions.valid(session)
            response = as_json({"needed": bool(self._tokens), "signed_in": signed_in or not self._tokens})
        response.headers["cache-control"] = "no-store"
        return response

    async def _begin(self, request: Request, name: str) -> RouteAnswer:
        id, address = request.id, guard.shown_address(request.client)
        if not self._tokens:
            return RouteAnswer(status=204)
        token = (await _token(request)).encode()
        right = self._tokens.match(token)
        wait = self._tries.check(address, right=right, guessable=self._tokens.guessable)
        if wait > 0.0:
            return guard.too_many_tries(id, wait)
        if not right:
            log.warning("a browser could not sign in: wrong service token", address=address)
            return refusal(id, Failure(UNAUTHENTICATED, "this is not the service token of this process"))
        return RouteAnswer(
            status=204, headers={"set-cookie": guard.set_cookie(name, self._sessions.begin(), self._secure)}
        )


async def _token(request: Request) -> str:
    body = b""
    try:
        async for chunk in request.pieces():
            body += chunk
            if len(body) > LARGEST:
                raise BadRequest(f"the sign-in request body may have at most {LARGEST} bytes")
    except ClientLeft:
        raise BadRequest("the sign-in request body is incomplete") from None
    try:
        return msgspec.json.decode(body, type=_Body).token
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest('expected the service token as JSON: {"token": "…"}') from None
