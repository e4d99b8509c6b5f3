"""Authentication of ordinary routes of the public port: only known principals pass, and none that asks too often.

The credential is checked before the body is read: a stranger's body is never waited for.
"""

from __future__ import annotations

from functools import partial

from headway.errors import RequestError, Unauthenticated
from headway.gateway.gateway import Gateway
from headway.http.error_responses import refuse
from headway.http.rate_limit_headers import RateLimitHeaders
from headway.http.requests import Handler, Request, RouteAnswer
from headway.identity.api_keys.credential import SERVICE
from headway.model import Failure, Principal
from headway.ports import Identity


class Authentication:
    """Give handlers requests of known principals only. What none of these routes runs counts as a poll.

    Arguments:
        identity: identity that knows the principals.
        gateway: gateway that counts polls and refusals.
    """

    def __init__(self, identity: Identity, gateway: Gateway) -> None:
        self._identity = identity
        self._gateway = gateway
        self._rate_limit_headers = RateLimitHeaders(gateway)

    def __call__(self, handler: Handler) -> Handler:
        """Handler behind the check."""

        async def checked(request: Request) -> RouteAnswer:
            return self._refusal(request) or await handler(request)

        return checked

    def _refusal(self, request: Request) -> RouteAnswer | None:
        """Answer to a request that does not pass. One that does gets its principal."""
        authorization = next((value for name, value in request.fields if name == b"authorization"), b"")
        try:
            principal = self._identity.identify(authorization)
            if principal is None:
                raise stranger(authorization)
        except RequestError as exc:
            self._gateway.counters.refusals[exc.code.lower(), "none", ""] += 1
            return refuse(request, exc.code, exc.message, exc.retry_after)
        request.principal = principal
        if not principal.limits:
            return None
        request.more = partial(self._rate_limit_headers.fields, principal.limits)
        over = self._gateway.limiter.poll(principal.limits)
        return None if over is None else self._over(request, principal, over)

    def _over(self, request: Request, principal: Principal, over: Failure) -> RouteAnswer:
        gateway = self._gateway
        gateway.counters.refusals[over.reason, gateway.settings.tier_names[principal.tier], ""] += 1
        answer = refuse(request, over.code, over.message, over.retry_after, over.reason)
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
