"""Stream of the dashboard's events (server-sent events), one for each tab."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway import errors
from headway.admin.dashboard.hub import MOST_VIEWERS, Hub
from headway.admin.dashboard.viewers import Viewer
from headway.http.error_responses import refusal

OPENING = b"retry: 1000\n\n"
"""Beginning of a stream: the browser connects again a second after it ended."""


class EventStream:
    """Route of the stream.

    Arguments:
        hub: hub of the process.
        valid: whether a session has not ended.
    """

    def __init__(self, hub: Hub, valid: Callable[[str], bool]) -> None:
        self._hub, self._valid = hub, valid

    async def answer(self, request: Request) -> Response:
        """Answer with the stream."""
        if self._hub.full:
            message = f"{MOST_VIEWERS} pages look at this process already; look at another one of the fleet"
            return refusal(request.state.request_id, errors.SERVICE_OVERLOADED, message, 5.0, "viewers")
        session: str = request.scope["state"].get("session", "")
        return _Stream(self._hub, lambda: not session or self._valid(session))


class _Stream(Response):
    """Answer that goes on until its client leaves, is too slow, has signed out, or the port closes."""

    def __init__(self, hub: Hub, welcome: Callable[[], bool]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._hub, self._welcome = hub, welcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, fields = scope["state"], Request(scope).headers
        viewer = Viewer(state.get("cut", lambda: None))
        state.get("stream", lambda: None)()
        leaving = asyncio.ensure_future(_left(receive))
        leaving.add_done_callback(lambda _: viewer.end())
        self._hub.join(viewer, fields.get("last-event-id", ""), state.get("shut") or asyncio.Event())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": OPENING, "more_body": True})
            while (event := await viewer.next()) is not None and self._welcome():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._hub.leave(viewer)
            leaving.cancel()


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
