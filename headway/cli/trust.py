"""How commands reach a service: whom they trust, which certificate they show, and the process that their environment describes."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.cli.commands import combined, option
from headway.errors import SettingError

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPConnection

trusting = combined((
    option("--ca", default="", metavar="FILE", envvar="HEADWAY_CA",
        help="Authorities to trust at https://; if left out: those of SSL_CERT_FILE, or of the system."),
    option("--cert", default="", metavar="FILE", envvar="HEADWAY_CERT", help="Certificate to show, where the service asks for one."),
    option("--cert-key", default="", metavar="FILE", envvar="HEADWAY_CERT_KEY", help="Its key; if left out: in the file of --cert."),
))  # fmt: skip
"""Options of a command that calls over TLS: `ca`, `cert` and `cert_key`."""

AUTHORITY = "--ca, or by SSL_CERT_FILE"
SHOWN = "--cert"
_PREFIX = "HEADWAY_"
_PORT, _HOST = 9000, "127.0.0.1"
_MOST_PORT = 65_535
_FILE = "headway.toml"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def make_context(ca: str, cert: str, cert_key: str, own: str = "") -> ssl.SSLContext:
    """Return a client's TLS context. Raises SettingError if a file is unusable.

    `ca` is a file of authorities to trust. Without one, only the certificate in the file `own` is trusted, whatever name is in it,
    or else the system's authorities. `cert` is a certificate to show, or empty. `cert_key` is empty if `cert` includes the key.
    """
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
    """Return a connection over TLS, or over plain HTTP without a context. It is opened by its first request."""
    from http.client import HTTPConnection, HTTPSConnection

    if tls is None:
        return HTTPConnection(host, port, timeout=timeout)
    return HTTPSConnection(host, port, timeout=timeout, context=tls)


def _trusting_only(file: str) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cadata=first_certificate(file))
    context.check_hostname = False  # This host's own process, at an address that the certificate may not name.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # Trust the certificate itself, not its issuer.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _why(exc: Exception) -> str:
    import ssl

    if isinstance(exc, ssl.SSLError):
        return f"cannot be used: {(exc.reason or 'no PEM').lower().replace('_', ' ')}"
    return f"cannot be read: {getattr(exc, 'strerror', None) or exc}"


class OwnProcess(NamedTuple):
    """Admin port of a process on this host. `certificate` is a file, or empty if the port speaks plain HTTP."""

    url: str
    certificate: str


def described(environ: Mapping[str, str] = os.environ) -> OwnProcess:
    """Return the process that would start from `environ` and its file, HEADWAY_CONFIG or headway.toml. Raises SettingError."""
    file = _file(environ.get(f"{_PREFIX}CONFIG", ""))

    def value(name: str, default: object) -> str:
        return environ.get(f"{_PREFIX}{name.upper()}") or str(file.get(name, default))

    certificate = value("tls_cert", "")
    host, port = _reached(value("admin_host", _HOST)), _port(value("admin_port", _PORT))
    return OwnProcess(f"{'https' if certificate else 'http'}://{host}:{port}", certificate)


def first_certificate(file: str) -> str:
    """Return the first certificate in a file of a process, which is the process's own, as PEM. Raises SettingError."""
    hint = "Name the authority to trust with --ca."
    try:
        match = _CERTIFICATE.search(Path(file).read_text(errors="replace"))
    except OSError as exc:
        raise SettingError("tls_cert", file, f"cannot be read: {exc.strerror}", hint) from None
    if match is None:
        raise SettingError("tls_cert", file, "holds no certificate in PEM format", hint)
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
        raise SettingError("admin_port", text, "lets the system choose a port, which is not known here", hint)
    if not (text.isascii() and text.isdigit() and int(text) <= _MOST_PORT):
        raise SettingError("admin_port", text, f"is not a port from 1 to {_MOST_PORT}", hint)
    return int(text)


def _reached(host: str) -> str:
    """Return `host` for a URL, with loopback in place of a wildcard."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host or _HOST
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else _HOST
    return f"[{address}]" if address.version == 6 else str(address)
