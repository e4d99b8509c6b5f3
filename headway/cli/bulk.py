"""`headway bulk`: run files of inputs on spare capacity, and fetch files of answers."""

from __future__ import annotations

import functools
import itertools
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import click
import msgspec

from headway.cli.admin import as_json, pretty, table
from headway.cli.commands import CommandGroup, combined, option
from headway.cli.trust import connect, make_context, trusting
from headway.errors import HeadwayError, SettingError

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
WITHIN = 60.0  # Seconds to wait for an answer.
EVERY = 1.0  # Seconds between requests for the state of a job.
AWAY = 90.0  # Seconds for which a command that waits for a job tolerates an unreachable service, for example during a restart.
COMPLETIONS, CHAT, EMBEDDINGS = ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
PIECE = 1 << 16  # Bytes of a file to send or fetch at a time.
LOOKED_AT = 100  # Number of non-empty lines to examine for JSON requests. If there are none, the lines are plain text.
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff")
_UTF_16 = "is UTF-16, convert it to UTF-8: `iconv -f UTF-16 -t UTF-8`"
_NUMBER = re.compile("[0-9]+")

_PUBLIC = combined((
    option("--url", default="http://127.0.0.1:8000", metavar="URL", envvar="HEADWAY_URL", help="The service's public port."),
    option("--key", default="", metavar="TEXT", envvar="HEADWAY_API_KEY",
        help="API key, if the service needs one; better set in the environment."),
    trusting,
))  # fmt: skip
_id = click.argument("id", metavar="ID", help="Id of the job: batch_…")


class BulkError(HeadwayError):
    """The file does not contain a job, or the public port is unreachable or refused the request."""


class Away(BulkError):
    """The public port is unreachable, or answered with status 5xx. `hint` says what to do if this lasts."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why + hint)
        self.why = why


class PublicPort:
    """Client of a public port, for bulk jobs. `url` includes any path that a proxy adds before the routes. See `make_context` for
    `ca`, `cert` and `cert_key`. Raises SettingError for a malformed `url` or an unusable file."""

    def __init__(self, url: str, key: str, ca: str, cert: str, cert_key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError("--url", url, "is not the URL of a public port", "For example http://127.0.0.1:8000.")
        self._url, self._parts = url.rstrip("/"), parts
        self._tls = make_context(ca, cert, cert_key) if parts.scheme == "https" else None
        self._header = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and return the JSON of the answer. Raises BulkError, as do the methods below."""
        content = None if body is None else msgspec.json.encode(body)
        with closing(self._connection()) as connection:
            answer = self._response(connection, method, path, content, {})
            with self._reaching():
                return msgspec.json.decode(answer.read())

    def send(self, name: str, pieces: Iterator[bytes]) -> str:
        """Upload a file piece by piece, and return its id."""
        boundary = secrets.token_hex(16)
        kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
        with closing(self._connection()) as connection:
            body = _form(boundary, name, pieces)
            answer = self._response(connection, "POST", "/v1/files", body, kind)
            return str(msgspec.json.decode(answer.read())["id"])

    def fetch(self, id: str, file: IO[bytes]) -> None:
        with closing(self._connection()) as connection:
            answer = self._response(connection, "GET", f"/v1/files/{id}/content", None, {})
            while piece := answer.read(PIECE):
                file.write(piece)

    def first_line(self, id: str) -> dict[str, Any]:
        with closing(self._connection()) as connection:
            answer = self._response(connection, "GET", f"/v1/files/{id}/content", None, {})
            with self._reaching():
                return dict(msgspec.json.decode(answer.readline()))

    def _connection(self) -> HTTPConnection:
        return connect(self._parts.hostname or "", self._parts.port, WITHIN, self._tls)

    def _response(
        self, connection: HTTPConnection, method: str, path: str, body: Any, fields: Mapping[str, str]
    ) -> HTTPResponse:
        with self._reaching():
            connection.request(method, self._parts.path.rstrip("/") + path, body, {**self._header, **fields})
            answer = connection.getresponse()
            if answer.status < 400:
                return answer
            content = answer.read()
        try:
            message = msgspec.json.decode(content)["error"]["message"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            message = answer.reason
            hint = ". Is this the service's public port (--url)?" if answer.status < 500 else ""
        else:
            hint = ". Set HEADWAY_API_KEY to yours" if answer.status == 401 else ""
        if answer.status == 404 and "nothing is served" in str(message):
            hint = ". Does this service run bulk jobs (--bulk-dir)?"
        from headway.runtime.log import escape

        kind = Away if answer.status >= 500 else BulkError
        raise kind(f"{self._url}: {escape(str(message))}{hint} ({answer.status})")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        from http.client import HTTPException

        try:
            yield
        except (OSError, HTTPException) as exc:
            reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            hint = ". Name the service's public port with --url."
            raise Away(f"{self._url} does not answer: {reason}", hint) from None


def with_public(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options for a public port to a command. The command gets the port's client as its argument `port`."""

    @functools.wraps(function)
    def command(url: str, key: str, ca: str, cert: str, cert_key: str, **given: Any) -> None:
        function(port=PublicPort(url, key, ca, cert, cert_key), **given)

    return _PUBLIC(command)


@click.group(cls=CommandGroup)
def bulk() -> None:
    """Bulk jobs run files of inputs on spare capacity. Submit, watch, fetch or cancel them."""


@bulk.command()
@click.argument("file", metavar="FILE", type=Path,
    help="File with one text per line, or with one request per line in OpenAI's form (JSONL).")  # fmt: skip
@option("--model", metavar="NAME", help="Model for lines of text. Default: the service's default model.")
@option("--endpoint", type=click.Choice(ENDPOINTS),
    help=f"Route for the lines. Default: the route of the first request, or {COMPLETIONS} for plain text.")  # fmt: skip
@option("--texts", is_flag=True, help="Treat each line as plain text, even if it looks like a request.")
@option("--window", default="24h", metavar="DURATION", help="Time limit for the job, such as 2h or 7d.")
@option("--wait", is_flag=True, help="Wait until the job ends, and show its progress.")
@with_public
@as_json
def submit(
    port: PublicPort, file: Path, model: str | None, endpoint: str | None, texts: bool, window: str, wait: bool, json: bool,
) -> None:  # fmt: skip
    """Upload a file and start a job for it. Print the id of the job.

    Exit codes: 0 done; 1 the service refused the job, or with --wait the job was not completed or some of its lines failed.
    """
    if model is not None:
        with suppress(Away):  # The job waits while the service doesn't know its models.
            port.ask("GET", f"/v1/models/{quote(model)}")
    try:
        with file.open("rb") as lines:
            endpoint, requests = read_lines(lines, str(file), model, endpoint, texts)
            id = port.send(file.name, requests)
    except OSError as exc:
        raise BulkError(f"{file}: {exc.strerror or exc}") from None
    job = port.ask("POST", "/v1/batches", {"input_file_id": id, "endpoint": endpoint, "completion_window": window})
    if not json:
        click.echo(job["id"])  # At once, so that a caller has it even if this command fails later.
    if wait:
        click.echo(f"{job['id']} is running, and continues even if this command ends", err=True)
        job = _wait(port, job)
        click.echo(_line(job), err=True)
        if job["error_file_id"] is not None:
            click.echo(_first_error(port, job), err=True)
    if json:
        click.echo(pretty(job))
    if wait and (job["status"] != "completed" or job["request_counts"]["failed"]):
        raise click.exceptions.Exit(1)


@bulk.command()
@_id
@option("--wait", is_flag=True, help="Wait until the job ends, and show its progress.")
@with_public
@as_json
def status(port: PublicPort, id: str, wait: bool, json: bool) -> None:
    """Show the progress of a job."""
    job = port.ask("GET", f"/v1/batches/{id}")
    job = _wait(port, job) if wait else job
    click.echo(pretty(job) if json else _line(job))


@bulk.command("list")
@option("--limit", type=click.IntRange(1, 100), default=20, metavar="N", help="How many jobs to list at most.")
@with_public
@as_json
def list_jobs(port: PublicPort, limit: int, json: bool) -> None:
    """List jobs, newest first."""
    jobs = port.ask("GET", f"/v1/batches?{urlencode({'limit': limit})}")["data"]
    if json:
        click.echo(pretty(jobs))
    elif not jobs:
        click.echo("no jobs")
    else:
        head = ("ID", "STATUS", "LINES", "DONE", "FAILED", "ENDPOINT", "EXPIRES AT")
        click.echo(table(head, [_cells(job) for job in jobs]))


@bulk.command()
@_id
@option("--out", type=Path, metavar="FILE", help="File to write to. Default: standard output.")
@option("--errors", is_flag=True, help="Fetch the errors instead of the answers.")
@with_public
def fetch(port: PublicPort, id: str, out: Path | None, errors: bool) -> None:
    """Fetch the answers of a job that has ended.

    Exit codes: 0 done, 1 there are none.
    """
    job = port.ask("GET", f"/v1/batches/{id}")
    name = "errors" if errors else "answers"
    file = job["error_file_id" if errors else "output_file_id"]
    if file is None and job["status"] not in ENDED:
        raise BulkError(f"{_line(job)} has not ended; wait for it with headway bulk status {id} --wait")
    if file is None:
        raise BulkError(f"{id} has no {name}: {_line(job)}")
    try:
        with nullcontext(sys.stdout.buffer) if out is None else out.open("wb") as target:
            port.fetch(file, target)
    except OSError as exc:
        raise BulkError(f"{out or 'standard output'}: {exc.strerror or exc}") from None


@bulk.command()
@_id
@with_public
@as_json
def cancel(port: PublicPort, id: str, json: bool) -> None:
    """Cancel a job. The answers that it already has are kept."""
    job = port.ask("POST", f"/v1/batches/{id}/cancel")
    click.echo(pretty(job) if json else _line(job))


def _form(boundary: str, name: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    quoted = name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
    yield (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode()
    yield from filter(None, pieces)
    yield f"\r\n--{boundary}--\r\n".encode()


def _wait(port: PublicPort, job: dict[str, Any]) -> dict[str, Any]:
    """Wait for a job to end. Show its progress on standard error, and why lines are waiting whenever the reason changes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(job["status"], total=None)
        say = functools.partial(progress.console.print, markup=False, highlight=False, soft_wrap=True)
        shown: list[str] = []
        while job["status"] not in ENDED:
            time.sleep(EVERY)
            job = _poll(port, job["id"], say)
            counts = job["request_counts"]
            done = counts["completed"] + counts["failed"]
            reasons = _reasons(job)
            # Numbers in a reason count down; don't show it again because of that.
            if (stripped := [_NUMBER.sub("", reason) for reason in reasons]) != shown and reasons:
                say("; ".join(reasons))
            shown = stripped
            status = f"{job['status']}, waiting" if reasons else job["status"]
            progress.update(bar, description=status, total=counts["total"] or None, completed=done)
    return job


def _poll(port: PublicPort, id: str, say: Callable[[str], None]) -> dict[str, Any]:
    until = 0.0
    while True:
        try:
            return dict(port.ask("GET", f"/v1/batches/{id}"))
        except Away as exc:
            now = time.monotonic()
            if not until:
                until = now + AWAY
                say(f"{exc.why}; trying again for {AWAY:.0f} seconds")
            elif now >= until:
                hint = f"the job continues once the service runs again; watch it with headway bulk status {id} --wait"
                raise BulkError(f"{exc.why}; {hint}") from None
            time.sleep(EVERY)


def _reasons(job: dict[str, Any]) -> list[str]:
    return [error["message"] for error in (job["errors"] or {"data": []})["data"]]


def _line(job: dict[str, Any]) -> str:
    from headway.runtime.log import escape

    counts = job["request_counts"]
    reasons = _reasons(job)
    status = f"{job['status']}: {'; '.join(reasons)}" if reasons else job["status"]
    lines = f"{counts['completed']} of {counts['total']} lines done, {counts['failed']} failed"
    return f"{job['id']} {escape(status)} ({lines})"


def _first_error(port: PublicPort, job: dict[str, Any]) -> str:
    from headway.runtime.log import escape

    line = port.first_line(job["error_file_id"])
    message = (line["error"] or line["response"]["body"]["error"])["message"]
    return (
        f"first error, in line {line['line']}: {escape(message)}. To see all: headway bulk fetch {job['id']} --errors"
    )


def _cells(job: dict[str, Any]) -> tuple[str, ...]:
    counts = job["request_counts"]
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["expires_at"]))
    numbers = (str(counts[name]) for name in ("total", "completed", "failed"))
    return (job["id"], job["status"], *numbers, job["endpoint"], until)


def read_lines(
    file: IO[bytes], name: str, model: str | None, endpoint: str | None, texts: bool
) -> tuple[str, Iterator[bytes]]:
    """Return the route for a file's lines, and an iterator over the lines as requests, in chunks of any size. Errors refer
    to the file as `name`. If `texts`, each line is text for `model` (None: the default model), even if it looks like a
    request. If `endpoint` is None, the route is that of the first request, or completions for lines of text. Raises
    BulkError, perhaps while iterating, if the file is empty or not UTF-8, or begins like a request but contains none."""
    begin = file.read(len(_BOM))
    if begin.startswith(_OTHER_BOMS):
        raise BulkError(f"{name} {_UTF_16}")
    start = len(_BOM) if begin == _BOM else 0
    file.seek(start)
    head = list(itertools.islice(((at, line) for at, line in enumerate(file, 1) if line.strip()), LOOKED_AT))
    if not head:
        raise BulkError(f"{name} is empty: write one input, or one JSON request, per line")
    for number, line in head:
        if b"\0" in line:
            raise BulkError(f"{name}, line {number}, contains a NUL byte. If the file {_UTF_16}")
    requests = [] if texts else [request for _, line in head if (request := _request(line)) is not None]
    file.seek(start)
    if requests:
        routes = (request["url"] for request in requests if request.get("url") in ENDPOINTS)
        return endpoint or next(routes, COMPLETIONS), iter(lambda: file.read(PIECE), b"")
    if not texts and (number := next((at for at, line in head if line.lstrip().startswith(b"{")), 0)):
        reason = "begins like JSON, but is not a request: a request has `custom_id`, `method`, `url` and `body`"
        hint = "Correct the file, or give --texts if each line is text for the model"
        raise BulkError(f"{name}, line {number}, {reason}. {hint}")
    endpoint = endpoint or COMPLETIONS
    return endpoint, _made(file, name, model, endpoint)


def _request(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line if it looks like a request, even a faulty one; None for other lines."""
    try:
        parsed = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_request = isinstance(parsed, dict) and ("custom_id" in parsed or isinstance(parsed.get("body"), dict))
    return parsed if is_request else None


def _made(file: IO[bytes], name: str, model: str | None, endpoint: str) -> Iterator[bytes]:
    lines: list[bytes] = []
    size = 0
    for number, raw in enumerate(file, 1):
        request = b""  # Blank lines are kept, so the uploaded file has the same line numbers.
        if raw.strip():
            try:
                text = raw.rstrip(b"\r\n").decode()
            except UnicodeDecodeError:
                raise BulkError(f"{name}, line {number}, is not UTF-8") from None
            body = {**({"model": model} if model else {}), **_input(text, endpoint)}
            request = msgspec.json.encode({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body})
        lines.append(request + b"\n")
        size += len(lines[-1])
        if size >= PIECE:
            yield b"".join(lines)
            lines, size = [], 0
    yield b"".join(lines)


def _input(text: str, endpoint: str) -> dict[str, Any]:
    if endpoint == CHAT:
        return {"messages": [{"role": "user", "content": text}]}
    return {"input" if endpoint == EMBEDDINGS else "prompt": text}
