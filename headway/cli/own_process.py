"""The process that this environment describes: where its admin port is, and its certificate. For `admin` and `trust`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headway.errors import SettingError

_PREFIX = "HEADWAY_"
_PORT, _HOST = 9000, "127.0.0.1"
_MOST_PORT = 65_535
_FILE = "headway.toml"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class OwnProcess(NamedTuple):
    """Admin port of a process on this host, and the file of its certificate; that is empty if it speaks plain HTTP."""

    url: str
    certificate: str


def described(environ: Mapping[str, str] = os.environ) -> OwnProcess:
    """Return the process that would start from `environ` and its file: HEADWAY_CONFIG, else headway.toml. Raises SettingError."""
    file = _file(environ.get(f"{_PREFIX}CONFIG", ""))

    def value(name: str, default: object) -> str:
        return environ.get(f"{_PREFIX}{name.upper()}") or str(file.get(name, default))

    certificate = value("tls_cert", "")
    host, port = _reached(value("admin_host", _HOST)), _port(value("admin_port", _PORT))
    return OwnProcess(f"{'https' if certificate else 'http'}://{host}:{port}", certificate)


def first_certificate(file: str) -> str:
    """Return the first certificate in a file, which is the process's own, as PEM. Raises SettingError if there is none."""
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
    """Return the address under which this host reaches `host`, for a URL: loopback for a wildcard."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host or _HOST
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else _HOST
    return f"[{address}]" if address.version == 6 else str(address)
