"""Client that commands use for the admin port."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headway.cli.commands import combined, option
from headway.cli.trust import AUTHORITY, SHOWN, connect, described, make_context, trusting
from headway.errors import HeadwayError, SettingError

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

T = TypeVar("T")

_ADMIN = combined((
    option("--admin", default="", metavar="URL", envvar="HEADWAY_ADMIN",
        help="The service's admin port. Default: the port on this host that HEADWAY_ADMIN_HOST, HEADWAY_ADMIN_PORT and HEADWAY_TLS_CERT "
        "describe, or else http://127.0.0.1:9000."),
    option("--token", default="", metavar="TEXT", envvar="HEADWAY_ADMIN_TOKEN",
        help="Service token, if the service has one; better set in the environment."),
    trusting,
))  # fmt: skip
as_json = option("--json", is_flag=True, help="Print JSON.")

_EXAMPLE = "http://127.0.0.1:9000"
SHORT = 10.0  # Seconds to wait for an answer that needs no GPU.
_NO_ROUTE = "nothing is served at"  # Start of Headway's message for an unknown path.
_WHERE = "name the port of --admin-port, 9000 unless set, as in --admin http://HOST:9000"
LONG = 60.0  # Seconds to wait for a replay, which runs on a GPU.


class AdminError(HeadwayError):
    """The admin port is unreachable (`status` is 0) or refused the request. `answer` is the response's decoded JSON."""

    def __init__(self, message: str, status: int = 0, answer: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class Admin:
    """Client of one admin port. If `url` is empty, it connects to the process that the environment describes, and trusts
    only that process's certificate unless `ca` is given. See `make_context` for `ca`, `cert` and `cert_key`. Raises
    SettingError for a malformed `url` or an unusable file."""

    def __init__(self, url: str, token: str, ca: str = "", cert: str = "", cert_key: str = "") -> None:
        own = ""
        if not url:
            url, own = described()
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise SettingError("--admin", url, f"is not a URL: {exc}", f"For example {_EXAMPLE}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise SettingError("--admin", url, "is not the URL of an admin port", f"For example {_EXAMPLE}.")
        if not (token.isascii() and token.isprintable()):
            raise SettingError("--token", "…", "must be printable ASCII", "Copy it again.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._tls = make_context(ca, cert, cert_key, own) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port
        first = token.partition(",")[0]  # The setting has two tokens while they are rotated.
        self._header = {"authorization": f"Bearer {first}"} if first else {}

    def get(self, path: str, query: Mapping[str, int] | None = None) -> Any:
        """Return the decoded answer to a GET request. Raises AdminError, as do the methods below."""
        return self._ask("GET", f"{path}?{urlencode(query)}" if query else path, SHORT)

    def text(self, path: str) -> str:
        return str(self._ask("GET", path, SHORT, json=False))

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path, SHORT)

    def post(self, path: str) -> Any:
        return self._ask("POST", path, LONG)

    def stream(self, path: str, fields: Mapping[str, str]) -> Iterator[bytes]:
        """Yield the lines of a stream until it ends. Give up after SHORT seconds without data."""
        connection = self._connection(SHORT)
        try:
            response = self._response(connection, "GET", path, fields)
            if response.status >= 400:
                raise self._refusal(response.status, response.reason, path, self._read(response.read))
            while line := self._read(response.readline):
                yield line
        finally:
            connection.close()

    def _ask(self, method: str, target: str, timeout: float, json: bool = True) -> Any:
        connection = self._connection(timeout)
        try:
            response = self._response(connection, method, target, {})
            body = self._read(response.read)
        finally:
            connection.close()
        if response.status >= 400:
            raise self._refusal(response.status, response.reason, target, body)
        if not json:
            return body.decode(errors="replace")
        try:
            return decode(body) if body else None
        except msgspec.DecodeError:
            text = body.decode(errors="replace")
            raise AdminError(f"{self.url}{target} is not an admin port of Headway: {text[:80]!r}") from None

    def _connection(self, timeout: float) -> HTTPConnection:
        return connect(self._host, self._port, timeout, self._tls)

    def _response(self, connection: HTTPConnection, method: str, path: str, fields: Mapping[str, str]) -> HTTPResponse:
        def ask() -> HTTPResponse:
            connection.request(method, path, headers={**self._header, **fields})
            return connection.getresponse()

        return self._read(ask)

    def _read(self, act: Callable[[], T]) -> T:
        from http.client import HTTPException

        try:
            return act()
        except (OSError, HTTPException) as exc:
            from headway.client.errors import tls_fault

            if fault := tls_fault(exc, AUTHORITY, SHOWN):
                raise AdminError(f"{self.url}: {fault}") from None
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc) or type(exc).__name__
            hint = "Is Headway running there? Name its admin port with --admin."
            raise AdminError(f"{self.url} does not answer: {reason}. {hint}") from None

    def _refusal(self, status: int, reason: str, target: str, body: bytes) -> AdminError:
        from headway.runtime.log import escape

        try:
            answer = decode(body) if body else None
        except msgspec.DecodeError:
            answer = None
        message = answer.get("message") if isinstance(answer, dict) else None
        hint = ". Set HEADWAY_ADMIN_TOKEN to it" if status == 401 else ""
        if status == 404 and (not message or str(message).startswith(_NO_ROUTE)):
            message = str(message or "").partition(";")[0]
            hint = f". This is not an admin port, perhaps the public one: {_WHERE}"
        self_explanatory = message and not hint and status in (400, 404)
        shown_status = "" if self_explanatory else f" ({status})"
        return AdminError(f"{self.url}: {escape(message or reason)}{hint}{shown_status}", status, answer)


def with_admin(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options for an admin port to a command. The command gets the port's client as its argument `port`."""

    @functools.wraps(function)
    def command(admin: str, token: str, ca: str, cert: str, cert_key: str, **given: Any) -> None:
        function(port=Admin(admin, token, ca, cert, cert_key), **given)

    return _ADMIN(command)


def decode(body: bytes) -> Any:
    """Decode the JSON of an answer. A member that contains an out-of-range number stays encoded."""
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {name: _member(raw) for name, raw in members.items()}


def _member(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return raw


def letter_path(id: str, tenant: str | None, act: str = "") -> str:
    """Return the path of a dead letter, or of the action `act` on it. Several tenants may have letters with the same id."""
    query = "" if tenant is None else f"?{urlencode({'tenant': tenant})}"
    return f"/internal/dlq/{quote(id, safe='')}{act}{query}"


def pretty(answer: Any) -> str:
    """Format JSON for people. Escape characters that could control a terminal."""
    from headway.runtime.log import escape

    text = msgspec.json.format(msgspec.json.encode(answer)).decode()
    return "\n".join(escape(line) for line in text.split("\n"))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Format a table. Escape characters that could control a terminal."""
    from headway.runtime.log import escape

    lines = [head, *(tuple(escape(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
