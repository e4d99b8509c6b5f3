"""Head of an inference request: principal, deadline, tier, id, preferences (`Prefer`, RFC 7240) and options.

It depends on the head alone and holds no instant, so that one serves all requests of a connection whose heads are equal. A client on a
kept connection sends the same head with every request, but for its Content-Length. So a head that was once parsed and found good is
known by the bytes around that number; a request that begins with the same bytes means the same, and is not parsed again. Nothing is
remembered beyond the connection, and the credential is looked up every time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec

from headway.doors.exchange import CodecContext, Reader, ReadInSteps, ReadRequest, Usual, unusual
from headway.doors.fields import ID_PREFIX, read_id, read_options, shorten
from headway.errors import BadRequest
from headway.gateway.lane import CLOSED, Lane
from headway.http.inference.codecs import NO_ROUTE, Codec
from headway.http.server.head import Head, RequestTarget, too_large
from headway.model import Principal, RequestOptions

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
        repeatable: True if the same head can be expected again, and means the same whatever its Content-Length.
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


MOST_DIGITS = 9
"""Most digits of the length of a body whose head is remembered."""
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % MOST_DIGITS)
_UNREAD = InferenceHead(NO_ROUTE, RequestOptions(0.0), NO_ROUTE.read_json)
_UNUSUAL = Usual(unusual, NO_ROUTE.write, b"", NO_ROUTE.write_one)


def _nobody() -> Principal | None:
    return None


class KnownHead(msgspec.Struct, eq=False):
    """Head of one request, or of all that repeat it on the same connection.

    Attributes:
        codec: codec of its route.
        marks: header lines that each answer gets whatever it is, each with its end.
        head: what it says.
        lane: lane of the requests with it.
        usual: way of those that are one text; its answers have the lines `kind`.
        open_by: facts for which the lane takes them with nothing more to be asked; None where it does not.
        still: function that tells the principal of its credential, as it is now.
        before: its beginning, up to the length of the body. Nothing begins with `()`.
        after: what follows the length.
        begin, latest: where the length begins, and where `after` ends at the latest.
        skipped: bytes of `after`.
    """

    codec: Codec
    marks: bytes
    head: InferenceHead = _UNREAD
    lane: Lane = CLOSED
    usual: Usual = _UNUSUAL
    kind: bytes = b""
    open_by: object = None
    still: Callable[[], Principal | None] = _nobody
    before: bytes | tuple[()] = ()
    after: bytes = b""
    begin: int = 0
    latest: int = 0
    skipped: int = 0

    def remember(self, raw: bytes, most: int, still: Callable[[], Principal | None]) -> bool:
        """Remember the bytes of the head. False: requests that repeat it are to be parsed.

        Arguments:
            raw: the head as it came.
            most: most bytes of a head.
            still: see above.
        """
        found = _LENGTH.search(raw)
        if found is None or len(raw) + MOST_DIGITS > most:
            return False
        self.still = still
        self.before, self.after = raw[: found.start(1)], raw[found.end(1) :]
        self.begin, self.skipped = len(self.before), len(self.after)
        self.latest = self.begin + MOST_DIGITS + self.skipped
        return True


UNKNOWN = KnownHead(NO_ROUTE, b"")
"""Head that no request repeats."""
