"""Options of commands that connect to a service: trusted CAs, client certificate, and the port from the environment."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.commands import combined, option
from headway.errors import SettingError

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPConnection

trusting = combined((  # Options of a command that connects over TLS: `ca`, `cert` and `cert_key`.
    option("--ca", default="", metavar="FILE", envvar="HEADWAY_CA",
        help="File of authorities to trust at https://. Default: the file in SSL_CERT_FILE, or the system's authorities."),
    option("--cert", default="", metavar="FILE", envvar="HEADWAY_CERT", help="Client certificate, if the service asks for one."),
    option("--cert-key", default="", metavar="FILE", envvar="HEADWAY_CERT_KEY", help="Private key of --cert. Default: in the same file."),
))  # fmt: skip

AUTHORITY = "--ca, or with SSL_CERT_FILE"
SHOWN = "--cert"
_PREFIX = "HEADWAY_"
_PORT, _HOST = 9000, "127.0.0.1"
_MOST_PORT = 65_535
_FILE = "headway.toml"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def make_context(ca: str, cert: str, cert_key: str, own: str = "") -> ssl.SSLContext:
    """Return a client's TLS context, which trusts the authorities in the file `ca`. If `ca` is empty, it trusts only the
    certificate in the file `own`, for any host. If both are empty, it trusts the system's authorities. `cert` is the
    client's certificate. `cert_key` is empty if `cert` includes the key. Raises SettingError if a file is unusable."""
    import ssl

    try:
        context = _trusting_only(own) if own and not ca else ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as exc:
        raise SettingError("--ca", ca, _why(exc), "Name a file of certificates in PEM format.") from None

    def refuse_encrypted() -> str:
        name, file = ("--cert-key", cert_key) if cert_key else ("--cert", cert)
        raise SettingError(name, file, "is encrypted", "Decrypt it with openssl pkey -in FILE -out KEY.")

    if cert_key and not cert:
        raise SettingError("--cert-key", cert_key, "has no effect without --cert", "Name the certificate as well.")
    if cert:
        try:
            context.load_cert_chain(cert, cert_key or None, refuse_encrypted)
        except (OSError, ValueError) as exc:
            hint = "Name a certificate and its key, in PEM format."
            raise SettingError("--cert", cert, f"{_why(exc)} (with its key {cert_key or cert})", hint) from None
    return context


def connect(host: str, port: int | None, timeout: float, tls: ssl.SSLContext | None) -> HTTPConnection:
    """Return a connection over TLS, or over plain HTTP if `tls` is None. The first request opens it."""
    from http.client import HTTPConnection, HTTPSConnection

    if tls is None:
        return HTTPConnection(host, port, timeout=timeout)
    return HTTPSConnection(host, port, timeout=timeout, context=tls)


def _trusting_only(file: str) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cadata=first_certificate(file))
    context.check_hostname = False  # A process on this host, whose certificate may not name the address used here.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # Trust the certificate itself, not its issuer.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _why(exc: Exception) -> str:
    import ssl

    if isinstance(exc, ssl.SSLError):
        return f"cannot be used: {(exc.reason or 'no PEM').lower().replace('_', ' ')}"
    return f"cannot be read: {getattr(exc, 'strerror', None) or exc}"


def described(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the URL of the admin port of a process with this environment and its settings file. Also return the port's
    certificate file, or "" for plain HTTP. Raises SettingError."""
    file = _file(environ.get(f"{_PREFIX}CONFIG", ""))

    def value(name: str, default: object) -> str:
        return environ.get(f"{_PREFIX}{name.upper()}") or str(file.get(name, default))

    certificate = value("tls_cert", "")
    host, port = _reached(value("admin_host", _HOST)), _port(value("admin_port", _PORT))
    return f"{'https' if certificate else 'http'}://{host}:{port}", certificate


def first_certificate(file: str) -> str:
    """Return the first certificate in a file as PEM. Servers put their own certificate first. Raises SettingError."""
    hint = "Name the authority to trust with --ca."
    try:
        match = _CERTIFICATE.search(Path(file).read_text(errors="replace"))
    except OSError as exc:
        raise SettingError("tls_cert", file, f"cannot be read: {exc.strerror}", hint) from None
    if match is None:
        raise SettingError("tls_cert", file, "contains no certificate in PEM format", hint)
    return match[0]


def _file(name: str) -> Mapping[str, Any]:
    if not name and not os.path.lexists(_FILE):
        return {}
    import tomllib

    source, hint = f"{_PREFIX}CONFIG" if name else _FILE, "Name the admin port with --admin."
    try:
        return tomllib.loads(Path(name or _FILE).read_text())
    except OSError as exc:
        raise SettingError(source, name or _FILE, f"cannot be read: {exc.strerror}", hint) from None
    except ValueError as exc:
        raise SettingError(source, name or _FILE, f"is not TOML: {exc}", hint) from None


def _port(text: str) -> int:
    hint = "Name the admin port with --admin, as in --admin http://127.0.0.1:9000."
    if text == "0":
        raise SettingError("admin_port", text, "lets the system choose the port, which this command cannot know", hint)
    if not (text.isascii() and text.isdigit() and int(text) <= _MOST_PORT):
        raise SettingError("admin_port", text, f"is not a port from 1 to {_MOST_PORT}", hint)
    return int(text)


def _reached(host: str) -> str:
    """Return `host` in the form used in URLs. A wildcard address becomes the loopback address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host or _HOST
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else _HOST
    return f"[{address}]" if address.version == 6 else str(address)
