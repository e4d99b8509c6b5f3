"""Builds requests for ordinary routes the way a connection does."""

import asyncio
from collections.abc import Mapping

from headway.http.problem import encode_problem
from headway.http.routing import Request
from headway.http.server.head import Head


def request(
    method: str,
    target: str,
    fields: Mapping[str, str] | None = None,
    body: bytes | None = b"",
    client: str = "127.0.0.1",
) -> Request:
    path, _, query = target.partition("?")
    lines = [(name.encode(), value.encode()) for name, value in (fields or {}).items()]
    head = Head(method.encode(), target.encode(), "1.1", lines)
    address, shut = (client, 1), asyncio.Event()
    made = Request(
        head, path.encode(), query.encode(), "req_door", address, encode_problem, shut, lambda: None, lambda: None
    )
    if body is not None:
        made.feed(body)
        made.end()
    return made
