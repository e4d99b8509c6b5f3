"""Stream of the dashboard's events (server-sent events), one for each tab."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

from headway import errors
from headway.admin.dashboard.hub import MOST_VIEWERS, Hub
from headway.admin.dashboard.viewers import Viewer
from headway.http.requests import Request, RouteAnswer, StreamedAnswer, refusal
from headway.model import Failure

OPENING = b"retry: 1000\n\n"
"""Beginning of a stream: the browser connects again a second after it ended."""
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream:
    """Route of the stream.

    Arguments:
        hub: hub of the process.
        valid: whether a session has not ended.
    """

    def __init__(self, hub: Hub, valid: Callable[[str], bool]) -> None:
        self._hub, self._valid = hub, valid

    async def answer(self, request: Request) -> RouteAnswer:
        """Answer with the stream."""
        if self._hub.full:
            message = f"{MOST_VIEWERS} pages look at this process already; look at another one of the fleet"
            return refusal(request.id, Failure(errors.SERVICE_OVERLOADED, message, 5.0, "viewers"))
        return StreamedAnswer(partial(self._events, request), _HEADERS, "text/event-stream; charset=utf-8")

    async def _events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Events until the client leaves, is too slow, has signed out, or the port closes."""
        session, viewer = request.session, Viewer(request.cut)
        leaving = asyncio.ensure_future(request.left())
        leaving.add_done_callback(lambda _: viewer.end())
        self._hub.join(viewer, request.headers.get("last-event-id", ""), request.shut)
        try:
            yield OPENING
            while (event := await viewer.next()) is not None and (not session or self._valid(session)):
                yield event
        finally:
            self._hub.leave(viewer)
            leaving.cancel()
