"""Client of the admin port, for commands: one request, one answer, errors in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import typer

from headway.cli.trust import AUTHORITY, SHOWN, make_context
from headway.errors import HeadwayError, SettingError

AdminUrl = Annotated[
    str, typer.Option("--admin", metavar="URL", envvar="HEADWAY_ADMIN", help="The service's admin port.")
]
Token = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        envvar="HEADWAY_ADMIN_TOKEN",
        help="Service token, if one is configured; better set in the environment.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]

DEFAULT_URL = "http://127.0.0.1:9000"
SHORT = 10.0
"""Seconds to wait for an answer that is ready at once."""
_NO_ROUTE = "nothing is served at"
"""Beginning of what Headway says of a path that a port does not have."""
_WHERE = "name the port of --admin-port, 9000 unless set, as in --admin http://HOST:9000"
LONG = 60.0
"""Seconds to wait for the answer to a replay, which runs on a GPU first."""


class AdminError(HeadwayError):
    """The admin port cannot be reached, or refuses. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Admin:
    """Client of one admin port.

    Arguments:
        url: http or https, host and port.
        token: service token, or empty.
        ca: file of the authorities to trust; empty: those of the system.
        cert: file of a certificate to show, or empty.
        cert_key: file of its key; empty: that of the certificate.

    Raises:
        SettingError: `url` is not such a URL, or a file cannot be used.
    """

    def __init__(self, url: str, token: str, ca: str = "", cert: str = "", cert_key: str = "") -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise SettingError("--admin", url, f"is not a URL: {exc}", f"For example {DEFAULT_URL}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise SettingError("--admin", url, "is not the URL of an admin port", f"For example {DEFAULT_URL}.")
        if not (token.isascii() and token.isprintable()):
            raise SettingError("--token", "…", "must be printable ASCII", "Copy it once more.")
        self._url = f"{parts.scheme}://{parts.netloc}"
        self._tls = make_context(ca, cert, cert_key) if parts.scheme == "https" else None
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

    def _ask(self, method: str, target: str, timeout: float, json: bool = True) -> Any:
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        host, port = self._host, self._port
        connection = (
            HTTPConnection(host, port, timeout=timeout)
            if self._tls is None
            else HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        )
        try:
            connection.request(method, target, headers=self._header)
            response = connection.getresponse()
            body = response.read()
        except (OSError, HTTPException) as exc:
            from headway.client.reaching import tls_fault

            if fault := tls_fault(exc, AUTHORITY, SHOWN):
                raise AdminError(f"{self._url}: {fault}") from None
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc) or type(exc).__name__
            hint = "Is Headway running there? Name its admin port with --admin."
            raise AdminError(f"{self._url} does not answer: {why}. {hint}") from None
        finally:
            connection.close()
        if not json and response.status < 400:
            return body.decode(errors="replace")
        try:
            answer = decode(body) if body else None
        except msgspec.DecodeError:
            answer = body.decode(errors="replace")
            if response.status < 400:
                raise AdminError(f"{self._url}{target} is no admin port of Headway: {answer[:80]!r}") from None
        if response.status >= 400:
            from headway.runtime.log import escape

            said = answer.get("message") if isinstance(answer, dict) else None
            hint = ". Set HEADWAY_ADMIN_TOKEN to it" if response.status == 401 else ""
            if response.status == 404 and (not said or str(said).startswith(_NO_ROUTE)):
                hint = f". This is no admin port, perhaps the public one: {_WHERE}"
            message = f"{self._url}: {escape(said or response.reason)}{hint} ({response.status})"
            raise AdminError(message, response.status)
        return answer


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
