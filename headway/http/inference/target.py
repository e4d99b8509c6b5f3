"""Target of a request at an inference route, and what opens a head that came to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from headway.doors.exchange import CodecContext, Reader
from headway.errors import BadRequest
from headway.http.server.head import Head, too_many_members
from headway.model import RequestOptions

_NAMED = ("model", "model_id", "version")
"""Members of a query that would say whom it is for."""


class RequestTarget(NamedTuple):
    """Target of a request, apart from its path's constant parts.

    Attributes:
        names: parts of the path that the route leaves open, decoded, by name.
        query: query as it stands in the request line.
    """

    names: Mapping[str, str]
    query: bytes

    def refuse_named(self, instead: str) -> None:
        """Refuse a query that names a model or a version, where another place does.

        Arguments:
            instead: what to do instead, for the message.

        Raises:
            BadRequest: the query names one, or has too many members. Others are ignored, as those of bodies are.
        """
        if not self.query:
            return
        if (error := too_many_members(self.query)) is not None:
            raise error
        for name, _ in parse_qsl(self.query.decode("latin-1"), keep_blank_values=True):
            if name in _NAMED:
                raise BadRequest(
                    f"the query names `{name}`, which only /v1/predict heeds, with application/octet-stream; {instead}"
                )


OpenHead = Callable[[Head, RequestTarget, RequestOptions, CodecContext], tuple[RequestOptions, Reader | None]]
"""Head of a request to its options and the reader of its body; None for `Codec.read_json`. Raises RequestError."""
