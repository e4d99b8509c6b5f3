"""Head of an inference request: principal, deadline, tier, id, preferences (`Prefer`, RFC 7240) and options.

It depends on the head alone and holds no instant, so that one serves all requests of a connection whose heads are
equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from headway.doors.exchange import CodecContext, Reader, ReadInSteps, ReadRequest
from headway.doors.fields import ID_PREFIX, read_id, read_options, shorten
from headway.errors import BadRequest
from headway.http.inference.codecs import Codec
from headway.http.inference.target import RequestTarget
from headway.http.server.head import Head, too_large
from headway.model import RequestOptions

HEAD = b"%b" + ID_PREFIX.encode() + b"%b\r\n%b%bcontent-length: %d\r\n\r\n"
"""Header of an answer, of its opening, the request's id, two times further lines, and the bytes of its body."""


CODINGS = ("gzip", "x-gzip", "deflate")
"""Codings of a body that some routes take."""


_PREFERENCE = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SECONDS = re.compile(rb"[0-9]{1,30}")


class InferenceHead(msgspec.Struct, eq=False, frozen=True):
    """Inference request without its body.

    Attributes:
        codec: codec of its route.
        options: options of the request.
        read: reader of its body.
        authorization: value of its header field, empty when there was none.
        id: UUID text the client chose, empty when it chose none.
        expects: whether the client waits for `100 Continue` before it sends the body.
        repeatable: whether a request with an equal head, but for the Content-Length, means the same, and may come soon.
        wish: whether it may become a task.
        wait: seconds for which a client that has this wish waits for the answer.
        coding: coding of its body; empty for none.
        read_long: reader of a long body, in steps; None where `read` is short for any.
    """

    codec: Codec
    options: RequestOptions
    read: ReadRequest
    authorization: bytes = b""
    id: str = ""
    expects: bool = False
    repeatable: bool = False
    wish: Wish | None = None
    wait: float = 0.0
    coding: str = ""
    read_long: ReadInSteps | None = None


def read_inference_head(
    codec: Codec,
    head: Head,
    target: RequestTarget,
    context: CodecContext,
    origin: str | None,
    only: Collection[str] = (),
) -> InferenceHead:
    """Read an inference request's head.

    Arguments:
        codec: codec of the route it came to.
        head: the head.
        target: its target.
        context: settings of the tiers, the longest timeout, and the largest body; what the models take.
        origin: see RequestOptions.
        only: the models that the credential may ask; empty for all.

    Raises:
        RequestError: a header field or the target is wrong, or the body is announced as too large.
    """
    settings = context.settings
    single, id, wish, wait = head.single, read_id(head.single), None, 0.0
    timeout = settings.longest_request_s
    if head.length > settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    coding = _coding(single[b"content-encoding"], codec.compressed) if b"content-encoding" in single else ""
    if b"prefer" in single and codec.tasks and (wish := read_prefer(single[b"prefer"])) is not None:
        wait = min(wish.wait, timeout)
        timeout = settings.longest_task_s
    options = read_options(single, settings, timeout, bool(id), origin, task=wish is not None, way=codec.way)
    reader: Reader | None = None
    if codec.open is None:
        target.refuse_named("name it in the body of /v1/inference")
    else:
        options, reader = codec.open(head, target, options, context.seen_by(only))
    read, read_long = (codec.read_json, codec.read_json_in_steps) if reader is None else reader
    return InferenceHead(
        codec,
        options,
        read,
        authorization=single.get(b"authorization", b""),
        id=id,
        expects=head.expects,
        repeatable=head.keep and head.length > 0 and not (head.expects or coding or options.key),
        wish=wish,
        wait=min(wait, options.timeout),
        coding=coding,
        read_long=read_long,
    )


def _coding(value: bytes, compressed: bool) -> str:
    """Coding of a body by its header field; empty for none. `compressed`: whether the route takes any."""
    coding = value.strip().lower().decode("latin-1")
    if coding in ("", "identity"):
        return ""
    if not compressed:
        raise BadRequest(f"Content-Encoding {shorten(value)} is not accepted; send the body as it is")
    if coding not in CODINGS:
        raise BadRequest(f"Content-Encoding {shorten(value)} is not accepted; expected gzip, deflate or none")
    return coding


def several_as_task() -> BadRequest:
    """Error of a request with several inputs whose client wants the id of a task, which is that of one input."""
    return BadRequest(
        "Prefer is respond-async, and a request with several inputs cannot become a task; send a request for each input, "
        "or leave Prefer out and wait for the outputs"
    )


class Wish(msgspec.Struct, frozen=True):
    """Wish of a client that accepts the id of a task for an answer.

    Attributes:
        wait: seconds for which it would rather wait for the answer itself; 0: not at all.
        applied: value of `Preference-Applied`.
    """

    wait: float
    applied: bytes


def read_prefer(value: bytes) -> Wish | None:
    """Read `respond-async` and `wait` in the value of `Prefer`, several lines of it joined by commas.

    Other preferences, and malformed ones, are passed over; of a preference that is there twice the first counts. None:
    the client waits for the answer.
    """
    preferences: dict[bytes, bytes] = {}
    for preference in _PREFERENCE.findall(value):
        name, _, word = preference.partition(b";")[0].partition(b"=")
        preferences.setdefault(name.strip().lower(), word.strip().strip(b'"'))
    if preferences.get(b"respond-async") != b"":
        return None
    wait = preferences.get(b"wait", b"")
    if _SECONDS.fullmatch(wait) is None:
        return Wish(0.0, b"respond-async")
    return Wish(float(wait), b"respond-async, wait=%d" % int(wait))
