"""Authentication of ordinary routes of the public port: only known principals pass, and none that asks too often.

The credential is checked before the body is read: a stranger's body is never waited for.
"""

from __future__ import annotations

from functools import partial

from headway.doors.entrance import Entrance
from headway.errors import RequestError
from headway.http.requests import Handler, Request, RouteAnswer, refuse, without_reason


class Authentication:
    """Give handlers requests of known principals only.

    Such a request counts towards its principal's rate limits where its route says so, and as a poll elsewhere.

    Arguments:
        entrance: entrance of requests, which knows the principals.
    """

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def __call__(self, handler: Handler, *, counts: bool = False) -> Handler:
        """Handler behind the check. `counts`: each call is a request, not a poll."""

        async def checked(request: Request) -> RouteAnswer:
            return self._refusal(request, counts) or await handler(request)

        return checked

    def _refusal(self, request: Request, counts: bool) -> RouteAnswer | None:
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
        if not counts:
            over = entrance.gateway.limiter.poll(principal.limits)
        elif (over := entrance.over(principal)) is None:
            entrance.charge(principal)
        if over is None:
            return None
        entrance.counters.refusals[over.reason, entrance.tiers[principal.tier], ""] += 1
        answer = refuse(request, over)
        answer.headers["cache-control"] = "no-store"
        return answer
