"""Client of the admin port, for commands: one request, one answer, errors in plain words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headway.cli.commands import combined, option
from headway.cli.own_process import described
from headway.cli.trust import AUTHORITY, SHOWN, make_context, trusting
from headway.errors import HeadwayError, SettingError

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

T = TypeVar("T")

_ADMIN = combined((
    option(
        "--admin",
        default="",
        metavar="URL",
        envvar="HEADWAY_ADMIN",
        help="The service's admin port; left out: as HEADWAY_ADMIN_HOST, HEADWAY_ADMIN_PORT and HEADWAY_TLS_CERT say of a "
        "process of this host, else http://127.0.0.1:9000.",
    ),
    option(
        "--token",
        default="",
        metavar="TEXT",
        envvar="HEADWAY_ADMIN_TOKEN",
        help="Service token, if one is configured; better set in the environment.",
    ),
    trusting,
))  # fmt: skip
as_json = option("--json", is_flag=True, help="Print it as JSON.")
"""Option of a command that prints JSON if it is asked to."""

_EXAMPLE = "http://127.0.0.1:9000"
SHORT = 10.0
"""Seconds to wait for an answer that is ready at once."""
_NO_ROUTE = "nothing is served at"
"""Beginning of what Headway says of a path that a port does not have."""
_WHERE = "name the port of --admin-port, 9000 unless set, as in --admin http://HOST:9000"
LONG = 60.0
"""Seconds to wait for the answer to a replay, which runs on a GPU first."""


class AdminError(HeadwayError):
    """The admin port cannot be reached, or refuses.

    Attributes:
        status: HTTP status; 0 when there was no answer.
        answer: what it answered, decoded.
    """

    def __init__(self, message: str, status: int = 0, answer: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class Admin:
    """Client of one admin port.

    Arguments:
        url: http or https, host and port; empty: those of the process that this environment describes.
        token: service token, or empty.
        ca: file of the authorities to trust; empty: those of the system, or without `url` that process's certificate alone.
        cert: file of a certificate to show, or empty.
        cert_key: file of its key; empty: that of the certificate.

    Attributes:
        url: http or https, host and port.

    Raises:
        SettingError: `url` is not such a URL, or a file cannot be used.
    """

    def __init__(self, url: str, token: str, ca: str = "", cert: str = "", cert_key: str = "") -> None:
        known = ""
        if not url:
            url, known = described()
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise SettingError("--admin", url, f"is not a URL: {exc}", f"For example {_EXAMPLE}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise SettingError("--admin", url, "is not the URL of an admin port", f"For example {_EXAMPLE}.")
        if not (token.isascii() and token.isprintable()):
            raise SettingError("--token", "…", "must be printable ASCII", "Copy it once more.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._tls = make_context(ca, cert, cert_key, known) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port
        first = token.partition(",")[0]  # A service takes two while its token changes.
        self._header = {"authorization": f"Bearer {first}"} if first else {}

    def get(self, path: str, query: Mapping[str, int] | None = None) -> Any:
        """Answer to a GET, decoded. Raises AdminError, as the methods below do."""
        return self._ask("GET", f"{path}?{urlencode(query)}" if query else path, SHORT)

    def text(self, path: str) -> str:
        """Answer to a GET that is text, such as the metrics."""
        return str(self._ask("GET", path, SHORT, json=False))

    def delete(self, path: str) -> Any:
        """Answer to a DELETE, decoded; None when it is empty."""
        return self._ask("DELETE", path, SHORT)

    def post(self, path: str) -> Any:
        """Answer to a POST without a body, decoded."""
        return self._ask("POST", path, LONG)

    def stream(self, path: str, fields: Mapping[str, str]) -> Iterator[bytes]:
        """Lines of an answer that goes on, until it ends; one of which nothing comes for some seconds is given up."""
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
            said = body.decode(errors="replace")
            raise AdminError(f"{self.url}{target} is no admin port of Headway: {said[:80]!r}") from None

    def _connection(self, timeout: float) -> HTTPConnection:
        from http.client import HTTPConnection, HTTPSConnection

        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=timeout)
        return HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)

    def _response(
        self, connection: HTTPConnection, method: str, target: str, fields: Mapping[str, str]
    ) -> HTTPResponse:
        def ask() -> HTTPResponse:
            connection.request(method, target, headers={**self._header, **fields})
            return connection.getresponse()

        return self._read(ask)

    def _read(self, act: Callable[[], T]) -> T:
        """Result of a step of an exchange. Raises AdminError when the port does not answer."""
        from http.client import HTTPException

        try:
            return act()
        except (OSError, HTTPException) as exc:
            from headway.client.reaching import tls_fault

            if fault := tls_fault(exc, AUTHORITY, SHOWN):
                raise AdminError(f"{self.url}: {fault}") from None
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc) or type(exc).__name__
            hint = "Is Headway running there? Name its admin port with --admin."
            raise AdminError(f"{self.url} does not answer: {why}. {hint}") from None

    def _refusal(self, status: int, reason: str, target: str, body: bytes) -> AdminError:
        from headway.runtime.log import escape

        try:
            answer = decode(body) if body else None
        except msgspec.DecodeError:
            answer = None
        said = answer.get("message") if isinstance(answer, dict) else None
        hint = ". Set HEADWAY_ADMIN_TOKEN to it" if status == 401 else ""
        if status == 404 and (not said or str(said).startswith(_NO_ROUTE)):
            said, hint = str(said or "").partition(";")[0], f". This is no admin port, perhaps the public one: {_WHERE}"
        plain = said and not hint and status in (400, 404)  # The words say all that the number does.
        return AdminError(
            f"{self.url}: {escape(said or reason)}{hint}{'' if plain else f' ({status})'}", status, answer
        )


def with_admin(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of an admin port, and what they name as its argument `port`."""

    @functools.wraps(function)
    def command(admin: str, token: str, ca: str, cert: str, cert_key: str, **given: Any) -> None:
        function(port=Admin(admin, token, ca, cert, cert_key), **given)

    return _ADMIN(command)


def decode(body: bytes) -> Any:
    """Answer of the port. A member with a number out of range, as an input may have one, stays as it is spelled."""
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
    """Path of the dead letter `id`, or of an act on it; of a tenant, or of the only tenant that has it."""
    of = "" if tenant is None else f"?{urlencode({'tenant': tenant})}"
    return f"/internal/dlq/{quote(id, safe='')}{act}{of}"


def pretty(answer: Any) -> str:
    """`answer` as JSON for people; nothing in it can steer a terminal."""
    from headway.runtime.log import escape

    text = msgspec.json.format(msgspec.json.encode(answer)).decode()
    return "\n".join(escape(line) for line in text.split("\n"))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Table whose columns are as wide as they need to be; nothing in a cell can steer a terminal."""
    from headway.runtime.log import escape

    lines = [head, *(tuple(escape(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
