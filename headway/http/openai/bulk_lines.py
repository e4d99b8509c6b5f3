"""Lines of OpenAI's batch files. Each line is a request. Its record contains the answer that the request's route would give.

    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {…}}
    {"id": "batch_req_…", "custom_id": "1", "response": {"status_code": 200, "request_id": "req_…", "body": {…}}, "error": null}

Error records also have `line`, the line number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from headway.bulk.lines import AT_ONCE, AskedLine, LineForm, Making, NotYet
from headway.config import Settings
from headway.core import failures
from headway.core.json_pages import SHORT, Steps
from headway.doors.bodies import decode_problem, members_in_steps, struct_reader
from headway.doors.exchange import Exchange, Outcome, Reader
from headway.doors.fields import ID_PREFIX
from headway.errors import INTERNAL, STATUS, UNFORESEEN, AnyError, BadRequest, PayloadTooLarge, RequestError
from headway.gateway.fan_out import joined, too_many_bytes
from headway.gateway.served_models import ServedModels
from headway.http.openai.answers import ChoicesWriter
from headway.http.openai.chat import chat_reader, completions_reader
from headway.http.openai.embeddings import embeddings_reader
from headway.http.problem import encode_openai_error
from headway.model import Failure, Reply, RequestOptions, Value
from headway.model.bulk import BulkJob, BulkLine
from headway.runtime.logger import get_logger

log = get_logger(__name__)

READERS: Mapping[str, Callable[[Settings], Reader]] = {
    "/v1/completions": completions_reader,
    "/v1/chat/completions": chat_reader,
    "/v1/embeddings": embeddings_reader,
}

_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
_OPTIONS = RequestOptions(0.0)
_MOST_CUSTOM_ID = 512
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_HERE = msgspec.Raw(b"null")  # Placeholder for the body. A large body is copied only once, directly into its place.


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Known(msgspec.Struct, gc=False):
    custom_id: str | None = None


class _Response(msgspec.Struct, gc=False):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Record(msgspec.Struct, gc=False, omit_defaults=True):
    id: str
    custom_id: str | None
    response: _Response | None
    error: dict[str, str] | None
    line: int = 0


_decode = msgspec.json.Decoder(_Line).decode
_take = struct_reader(_Line, ("body",))
_decode_known = msgspec.json.Decoder(_Known).decode
_encode = msgspec.json.Encoder().encode


class OpenAILines(LineForm):
    """Reads and writes lines; see `headway.bulk.lines.LineForm`. Raises SettingError if a chat template can't be used."""

    def __init__(self, settings: Settings, served: ServedModels, new_id: Callable[[], str]) -> None:
        self._readers = {path: make(settings) for path, make in READERS.items()}
        self._max_body, self._version = settings.max_body_bytes, settings.model_version
        self._max_answer = settings.bodies_bytes // 2
        self._served, self._new_id = served, new_id

    def read(self, job: BulkJob, number: int, text: bytes) -> Steps[AskedLine | bytes]:
        custom_id: str | None = None
        try:
            line = yield from self._decoded(text)
            custom_id = line.custom_id
            exchange = yield from self._exchange(job, line)
        except RequestError as exc:
            return self._failed(number, custom_id or _custom_id(text), exc)
        except NotYet:
            raise
        except Exception as exc:
            return self._fault(job.id, number, custom_id, exc)

        def record(ended: Sequence[Reply] | Failure) -> Making:
            try:
                if isinstance(ended, Failure):
                    yield False, self._failed(number, line.custom_id, ended)
                else:
                    yield from self._answered(number, line.custom_id, exchange, ended)
            except Exception as exc:
                yield False, self._fault(job.id, number, line.custom_id, exc)

        parts = [
            BulkLine(job.id, job.tenant, number, exchange.model or "", "", input, exchange.parameters, part)
            for part, input in enumerate(_inputs(exchange))
        ]
        exchange.input = ""
        return AskedLine(parts, len(text), record, self._max_answer)

    def expired(self, number: int, text: bytes) -> bytes:
        return _encode(_Record(self._record_id(), _custom_id(text), None, _EXPIRED, number))

    def _decoded(self, text: bytes) -> Steps[_Line]:
        if len(text) > self._max_body:
            raise PayloadTooLarge(f"the line is larger than {self._max_body} bytes (max_body_bytes)")
        if text.startswith(_UTF_16):
            raise BadRequest("the file is UTF-16; expected UTF-8")
        if text.startswith(b"\0"):  # The second octet of a UTF-16 line break.
            raise BadRequest("the line starts with a zero byte, as in UTF-16; expected JSON in UTF-8")
        try:
            line: _Line = _take((yield from members_in_steps(text))) if len(text) > SHORT else _decode(text)
        except BadRequest as exc:
            raise BadRequest(exc.message.replace("the body", "the line")) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text).replace("the body", "the line")) from None
        if not 0 < len(line.custom_id) <= _MOST_CUSTOM_ID:
            raise BadRequest(f"expected a string of 1 to {_MOST_CUSTOM_ID} characters - at `$.custom_id`")
        if line.method != "POST":
            raise BadRequest("expected POST - at `$.method`")
        return line

    def _exchange(self, job: BulkJob, line: _Line) -> Steps[Exchange]:
        """Decode the body of a line. Raises RequestError if the line can't run, and NotYet if its model isn't known yet."""
        if line.url != job.endpoint:
            raise BadRequest(f"expected {job.endpoint}, the endpoint of the batch - at `$.url`")
        only = frozenset(job.models)
        reader, body, known = self._readers[job.endpoint], bytes(line.body), self._served.seen_by(only)
        if reader.in_steps is not None and len(body) > SHORT:
            exchange = yield from reader.in_steps(body, _OPTIONS, known)
        else:
            exchange = reader.at_once(body, _OPTIONS, known)
        if isinstance(exchange.write, ChoicesWriter) and exchange.write.stream:
            raise BadRequest("batches do not support streams; leave this out - at `$.stream`")
        model = exchange.model = exchange.model or self._served.default_of(only)
        failure: Failure | None
        if model not in self._served or (only and model not in only):
            failure = self._served.absence(model, only)
        else:
            inputs = _inputs(exchange)
            failure = too_many_bytes(inputs, exchange.parameters, self._max_body) or self._check(model, inputs)
        if failure is not None and (self._served.in_doubt() or not self._served.models):
            raise NotYet(failure.message)
        if failure is not None:
            raise failures.error_of(failure)
        return exchange

    def _check(self, model: str, inputs: Sequence[Value]) -> Failure | None:
        for part, input in enumerate(inputs):
            if (failure := self._served.check(model, input)) is not None:
                return failures.of_input(part, len(inputs), failure)
        return None

    def _answered(self, number: int, custom_id: str, exchange: Exchange, replies: Sequence[Reply]) -> Making:
        shown = ID_PREFIX + self._new_id()
        ran = joined("", replies).ran
        version = (ran.version if ran is not None else "") or self._version
        outputs = [reply.output for reply in replies if reply.output is not None]
        pieces, size = list[bytes](), 0
        try:
            _, written = exchange.write(Outcome(shown, outputs, 0.0, version, [reply.tokens for reply in replies]))
            for piece in (written,) if isinstance(written, bytes) else written:
                pieces.append(piece.translate(None, b"\r\n"))  # JSON may contain line breaks as whitespace.
                size += len(piece)
                if size >= AT_ONCE:
                    size = 0
                    yield None
        except RequestError as exc:
            yield False, self._failed(number, custom_id, exc)
        except UnicodeEncodeError:
            yield False, self._failed(number, custom_id, failures.no_text())
        else:
            record = _encode(_Record(self._record_id(), custom_id, _Response(200, shown, _HERE), None))
            head, here, tail = record.partition(b'"body":null')
            yield True, b"".join((head, here[:-4], *pieces, tail))

    def _fault(self, job: str, number: int, custom_id: str | None, exc: Exception) -> bytes:
        log.error("a line of a bulk job failed", job=job, line=number, exc_info=exc)
        return self._failed(number, custom_id, Failure(INTERNAL, UNFORESEEN))

    def _failed(self, number: int, custom_id: str | None, error: AnyError) -> bytes:
        shown = ID_PREFIX + self._new_id()
        _, body = encode_openai_error(error, shown)
        response = _Response(STATUS[error.code], shown, msgspec.Raw(body))
        return _encode(_Record(self._record_id(), custom_id, response, None, number))

    def _record_id(self) -> str:
        return "batch_req_" + self._new_id().replace("-", "")


def _custom_id(text: bytes) -> str | None:
    try:
        return _decode_known(text).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _inputs(exchange: Exchange) -> list[Value]:
    return exchange.input if isinstance(exchange.input, list) else [exchange.input]
