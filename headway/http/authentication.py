"""Authentication of ordinary routes of the public port: only known principals pass, and none that asks too often.

The credential is checked before the body is read: a stranger's body is never waited for.
"""

from __future__ import annotations

from functools import partial

from headway.errors import RequestError
from headway.http.entrance import Entrance
from headway.http.requests import Handler, Request, RouteAnswer, refuse, without_reason


class Authentication:
    """Give handlers requests of known principals only. What none of these routes runs counts as a poll.

    Arguments:
        entrance: entrance of requests, which knows the principals.
    """

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def __call__(self, handler: Handler) -> Handler:
        """Handler behind the check."""

        async def checked(request: Request) -> RouteAnswer:
            return self._refusal(request) or await handler(request)

        return checked

    def _refusal(self, request: Request) -> RouteAnswer | None:
        """Answer to a request that does not pass. One that does gets its principal."""
        authorization = next((value for name, value in request.fields if name == b"authorization"), b"")
        entrance = self._entrance
        try:
            principal = entrance.identify(authorization)
        except RequestError as exc:
            entrance.counters.refusals[exc.code.lower(), "none", ""] += 1
            return refuse(request, without_reason(exc))
        request.principal = principal
        if not principal.limits:
            return None
        request.more = partial(entrance.rate_limits.fields, principal.limits)
        over = entrance.gateway.limiter.poll(principal.limits)
        if over is None:
            return None
        entrance.counters.refusals[over.reason, entrance.tiers[principal.tier], ""] += 1
        answer = refuse(request, over)
        answer.headers["cache-control"] = "no-store"
        return answer
