"""The head of an inference request: deadline, tier, id, preferences (`Prefer`, RFC 7240) and options.

A client that keeps its connection open sends the same head with every request, except for Content-Length. So the connection remembers
the bytes before and after that number, and doesn't parse the head of a request that has the same bytes. A parsed head therefore
contains neither the time nor anything from the body. The credential is checked every time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec

from headway.doors.exchange import CodecContext, Reader, ReadInSteps, ReadRequest, Usual, unusual
from headway.doors.fields import ID_PREFIX, read_id, read_options, shorten
from headway.errors import BadRequest
from headway.gateway.pending import CLOSED, Lane
from headway.http.inference.codecs import NO_ROUTE, Codec
from headway.http.server.head import Head, RequestTarget, too_large
from headway.model import Principal, RequestOptions

HEAD = b"%b" + ID_PREFIX.encode() + b"%b\r\n%b%bcontent-length: %d\r\n\r\n"
"""Template of an answer's head: status line, request id, two groups of additional lines, and the length of the body."""

CODINGS = ("gzip", "x-gzip", "deflate")

_PREFERENCE = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SECONDS = re.compile(rb"[0-9]{1,30}")


class InferenceHead(msgspec.Struct, eq=False, frozen=True):
    """The parsed head of an inference request.

    `authorization` and `coding` are the values of header fields. `id` is a UUID chosen by the client. All three may be empty.
    `expects` is True if the client waits for `100 Continue`. `repeatable` is True if later requests may repeat the head with
    another Content-Length. A client with a `wish` gets a task if there is no answer within `wait` seconds. `read_long` is None
    if `read` is always fast."""

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
    """Read the head of an inference request. For `origin` see RequestOptions. `only` has the models that the credential may use;
    empty means all. Raises RequestError if a field or the target is invalid, or the body is too large."""
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
    """Return the coding from Content-Encoding, or "". `compressed` is True if the route accepts compressed bodies."""
    coding = value.strip().lower().decode("latin-1")
    if coding in ("", "identity"):
        return ""
    if not compressed:
        raise BadRequest(f"Content-Encoding {shorten(value)} is not accepted; send the body uncompressed")
    if coding not in CODINGS:
        raise BadRequest(f"Content-Encoding {shorten(value)} is not accepted; expected gzip, deflate or none")
    return coding


def several_as_task() -> BadRequest:
    """Return the error for a request with several inputs that asks to become a task. A task has only one input."""
    return BadRequest(
        "Prefer is respond-async, but a request with several inputs cannot become a task; send a request for each input, "
        "or leave Prefer out and wait for the outputs"
    )


class Wish(msgspec.Struct, frozen=True):
    """A request to become a task if there is no answer within `wait` seconds. `applied` is the value of `Preference-Applied`."""

    wait: float
    applied: bytes


def read_prefer(value: bytes) -> Wish | None:
    """Read `respond-async` and `wait` from `Prefer`. Return None if the client does not want a task. Other preferences and
    malformed ones are ignored. If a preference is repeated, the first one counts."""
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


MOST_DIGITS = 9  # Maximum number of digits in the Content-Length of a remembered head.
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % MOST_DIGITS)
_UNREAD = InferenceHead(NO_ROUTE, RequestOptions(0.0), NO_ROUTE.read_json)
_UNUSUAL = Usual(unusual, NO_ROUTE.write, b"", NO_ROUTE.write_one)


def _nobody() -> Principal | None:
    return None


class KnownHead(msgspec.Struct, eq=False):
    """The head of a request, and of later requests on the connection that repeat it.

    All answers get the header lines `marks`. Requests enter `lane`, without further checks while `open_by` is `gateway.facts`.
    `usual` is the fast path for requests with a single text, and `kind` has the header lines of its answers. `still` returns
    the current principal of the credential.

    A repeated head consists of the bytes `before`, the value of Content-Length, and the bytes `after`. The value of
    Content-Length starts at position `begin`. `skipped` is the length of `after`. `latest` is the last position at which the
    head may end. Until a head is remembered, `before` is `()`, which matches nothing."""

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

    def remember(self, raw: bytes, limit: int, still: Callable[[], Principal | None]) -> bool:
        """Remember the bytes `raw` of the head. Return False if Content-Length is missing or unusual, or if a repeated head
        could have more than `limit` bytes."""
        match = _LENGTH.search(raw)
        if match is None or len(raw) + MOST_DIGITS > limit:
            return False
        self.still = still
        self.before, self.after = raw[: match.start(1)], raw[match.end(1) :]
        self.begin, self.skipped = len(self.before), len(self.after)
        self.latest = self.begin + MOST_DIGITS + self.skipped
        return True


UNKNOWN = KnownHead(NO_ROUTE, b"")  # A head that matches no request.
