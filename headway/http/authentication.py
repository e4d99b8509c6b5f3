"""Authentication of ordinary routes of the public port: only known principals pass, and none that asks too often.

The credential is checked before the body is read: a stranger's body is never waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.errors import RequestError, Unauthenticated
from headway.gateway.gateway import Gateway
from headway.http.error_responses import refusal
from headway.http.rate_limit_headers import RateLimitHeaders
from headway.identity.api_keys.credential import SERVICE
from headway.model import Failure, Principal
from headway.ports import Identity


class Authentication:
    """Put the principal into the request's state as `principal`, or refuse. What none of these routes runs counts as a poll.

    Arguments:
        app: application behind the check.
        identity: identity that knows the principals.
        gateway: gateway that counts polls and refusals.
    """

    def __init__(self, app: ASGIApp, identity: Identity, gateway: Gateway) -> None:
        self._app = app
        self._identity = identity
        self._gateway = gateway
        self._rate_limit_headers = RateLimitHeaders(gateway)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer why not."""
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        try:
            principal = self._identity.identify(authorization)
            if principal is None:
                raise stranger(authorization)
        except RequestError as exc:
            self._gateway.counters.refusals[exc.code.lower(), "none", ""] += 1
            state = scope["state"]
            answer = refusal(state["request_id"], exc.code, exc.message, exc.retry_after, encode=state["encode_error"])
            await answer(scope, receive, send)
            return
        if principal.limits and (over := self._gateway.limiter.poll(principal.limits)) is not None:
            await self._over(principal, over, scope["state"])(scope, receive, send)
            return
        scope["state"]["principal"] = principal
        await self._app(scope, receive, self._telling(principal, send) if principal.limits else send)

    def _telling(self, principal: Principal, send: Send) -> Send:
        """Make a `send` that adds the principal's limits to the header of the answer, whatever that is."""

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields = self._rate_limit_headers.fields(principal.limits)
                message["headers"] += [(name.encode(), value.encode()) for name, value in fields.items()]
            await send(message)

        return tell

    def _over(self, principal: Principal, over: Failure, state: Mapping[str, Any]) -> Response:
        gateway = self._gateway
        gateway.counters.refusals[over.reason, gateway.settings.tier_names[principal.tier], ""] += 1
        answer = refusal(
            state["request_id"], over.code, over.message, over.retry_after, over.reason, state["encode_error"]
        )
        answer.headers.update(self._rate_limit_headers.fields(principal.limits))
        answer.headers["cache-control"] = "no-store"
        return answer


def stranger(authorization: bytes) -> Unauthenticated:
    """Error of a request without a known principal, whose `Authorization` had this value."""
    if authorization[7:].strip().startswith(SERVICE):
        return Unauthenticated("this is a service token, which is good on the admin port only: send a client's key")
    if authorization:
        return Unauthenticated(
            "the credential is not valid: it is mistyped, revoked or expired, or of another service; send Authorization: Bearer KEY with one that is good here"
        )
    return Unauthenticated("a key is required: send Authorization: Bearer KEY")
