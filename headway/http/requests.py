"""Requests and answers of ordinary routes, all but inference; errors under the request's own id and in the form of its path's API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import cached_property
from urllib.parse import parse_qs, unquote

from headway import errors
from headway.errors import AnyError, RequestError
from headway.http.problem import EncodeError, encode_problem
from headway.http.server.head import Head
from headway.model import Failure, Principal

JSON = "application/json"


class ClientLeft(Exception):
    """The client has left, or was refused, before all of its body had come."""


class Request:
    """Request of an ordinary route.

    Arguments:
        head: head of the request.
        path: path of its target as it was sent.
        query: query of its target.
        id: the request's id as clients see it, `req_…`.
        client: address of the client and its port; None where it has none.
        encode_error: encodes errors as the API of the path has them.
        shut: set when the port closes, so that who waits for news is answered.
        cut: closes the connection at once.
        want: called when more of the body is waited for.

    Attributes:
        method: method in capitals.
        path: path without its percent-encoding.
        fields: fields of the header in order, names in lower case.
        params: parts of the path that its route names.
        principal: principal of a route that asks for one.
        session: session of a browser that has signed in; empty for none.
        more: makes further fields of the answer's header, whatever the answer is.
        gone: whether nobody waits for the answer any more.
    """

    def __init__(
        self,
        head: Head,
        path: bytes,
        query: bytes,
        id: str,
        client: tuple[str, int] | None,
        encode_error: EncodeError,
        shut: asyncio.Event,
        cut: Callable[[], None],
        want: Callable[[], None],
    ) -> None:
        self.method, self.path, self.fields = head.method.decode(), unquote(path.decode()), head.fields
        self.id, self.client, self.encode_error, self.shut, self.cut = id, client, encode_error, shut, cut
        self.raw_query = query.decode("latin-1")
        self.params: Mapping[str, str] = {}
        self.principal: Principal
        self.session = ""
        self.more: Callable[[], Mapping[str, str]] | None = None
        self.gone = False
        self._want = want
        self._body, self._complete, self._news = bytearray(), False, asyncio.Event()

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Fields of the header, by their names in lower case; of several the first."""
        return {name.decode(): value.decode("latin-1") for name, value in reversed(self.fields)}

    @cached_property
    def query(self) -> Mapping[str, list[str]]:
        """Parameters of the query, each with its values."""
        return parse_qs(self.raw_query, keep_blank_values=True)

    def param(self, name: str) -> str | None:
        """Value of a parameter of the query, of several the last; None where there is none."""
        return self.query.get(name, (None,))[-1]

    def feed(self, content: bytes) -> int:
        """Take a piece of the body. Returns how many bytes wait to be read."""
        self._body += content
        self._news.set()
        return len(self._body)

    def end(self) -> None:
        """Note that the body is complete."""
        self._complete = True
        self._news.set()

    def leave(self) -> None:
        """Note that nobody waits for the answer any more."""
        self.gone = True
        self._news.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Pieces of the body, as they come.

        Raises:
            ClientLeft: no more of it will come.
        """
        while not self.gone:
            if self._body:
                piece = bytes(self._body)
                self._body.clear()
                yield piece
            elif self._complete:
                return
            else:
                self._want()
                self._news.clear()
                await self._news.wait()
        raise ClientLeft

    async def left(self) -> None:
        """Return when the client has left. What comes of its body is dropped."""
        with contextlib.suppress(ClientLeft):
            async for _ in self.pieces():
                pass
        while not self.gone:
            self._news.clear()
            await self._news.wait()


class RouteAnswer:
    """Answer of an ordinary route.

    Arguments:
        body: its body.
        status: its status.
        headers: fields of its header, but for what framing adds.
        media_type: type of the body; None: it is among `headers`, or there is no body.
    """

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        self.body, self.status = body, status
        self.headers = dict(headers or {})
        if media_type is not None:
            self.headers["content-type"] = media_type


class StreamedAnswer(RouteAnswer):
    """Answer that goes on until its client leaves, or its pieces end.

    Arguments:
        pieces: makes the pieces of the body.
        headers: fields of its header, but for what framing adds.
        media_type: type of the body.
        ended: is called once when the answer has ended, or its client has left.
    """

    def __init__(
        self,
        pieces: Callable[[], AsyncGenerator[bytes, None]],
        headers: Mapping[str, str],
        media_type: str,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        self.pieces, self.ended = pieces, ended


Handler = Callable[[Request], Awaitable[RouteAnswer]]
"""Function that answers requests. It may raise errors of `headway.errors`, which become answers."""


def refusal(id: str, error: AnyError, encode: EncodeError = encode_problem) -> RouteAnswer:
    """Answer to a request that is refused.

    Arguments:
        id: the request's id as clients see it, `req_…`.
        error: error that it is refused with.
        encode: encodes the error.
    """
    fields, body = encode(error, id)
    return RouteAnswer(body, errors.STATUS[error.code], fields)


def without_reason(error: RequestError) -> Failure:
    """Error as ordinary routes tell it whose handler raises it, without a label of its reason."""
    return Failure(error.code, error.message, error.retry_after)


def refuse(request: Request, error: AnyError) -> RouteAnswer:
    """Answer to `request`, which is refused; see `refusal`."""
    return refusal(request.id, error, request.encode_error)
