"""Certificates, keys and authorities in PEM files: checks, with errors that name the file's setting, and dates."""

from __future__ import annotations

import re
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path

from headway.config import flag
from headway.errors import SettingError

_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL)
_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""Permissions on a key's file that only its owner should have; a group may read it."""

_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's reasons for a key that belongs to another certificate."""

_PEM = "Name a file in PEM format, which begins with -----BEGIN CERTIFICATE-----."
_NO_CERTIFICATE = ("is not a certificate", _PEM)
_NO_KEY = (
    "holds no private key that can be read",
    "Name a file in PEM format, with -----BEGIN PRIVATE KEY----- in it.",
)
_ENCRYPTED = (
    "is encrypted, and nobody is there to type its password at a restart",
    "Decrypt it with openssl pkey -in FILE -out KEY, and let only the user that Headway runs as read KEY.",
)
_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18
_CENTURY = 50
"""Two-digit years from this one on are of the last century."""


class Pair:
    """Certificate and its key, read and checked.

    Arguments:
        setting: setting that names the certificate.
        path: its path, and that of the certificates between it and an authority.
        key_setting: setting that names the key.
        key: path of the key; empty: the file of the certificate.

    Attributes:
        setting, path: as given.
        key_path: path of the file that holds the key.
        chain: text of the certificates.
        key: text of the key.
        first: the certificate itself, in DER.
        open_key: permissions on the key's file, if others have any; else empty.

    Raises:
        SettingError: a file cannot be used.
    """

    def __init__(self, setting: str, path: str, key_setting: str, key: str) -> None:
        self.setting, self.path = setting, path
        self._key_setting, self.key_path = (key_setting, key) if key else (setting, path)
        self.chain = content(setting, path)
        self.key = content(self._key_setting, self.key_path)
        self.first = _check_chain(setting, path, self.chain)
        _check_key(self._key_setting, self.key_path, self.key, key_setting)
        mode = stat.S_IMODE(Path(self.key_path).stat().st_mode)
        self.open_key = f"{mode:04o}" if mode & _OTHERS else ""

    def show_in(self, context: ssl.SSLContext) -> None:
        """Let handshakes of a context show the certificate.

        Raises:
            SettingError: the two do not fit, or will not do for TLS.
        """

        def refuse_encrypted() -> str:
            raise SettingError(self._key_setting, self.key_path, *_ENCRYPTED)

        try:
            context.load_cert_chain(self.path, self.key_path, refuse_encrypted)
        except ssl.SSLError as exc:
            if exc.reason in _MISMATCHES:
                reason = f"is not the key of the certificate {self.path}"
                hint = "Name the two that were made together."
                raise SettingError(self._key_setting, self.key_path, reason, hint) from None
            if exc.reason in (None, "PEM_LIB") or "PEM" in str(exc):
                raise SettingError(self._key_setting, self.key_path, *_NO_KEY) from None
            reason = f"will not do for TLS: {(exc.reason or str(exc)).lower().replace('_', ' ')}"
            raise SettingError(self.setting, self.path, reason, "Have a stronger one issued.") from None
        except OSError as exc:
            raise SettingError(self._key_setting, self.key_path, *_unread(exc)) from None


def content(setting: str, path: str) -> bytes:
    """Return the content of the file that a setting names.

    Raises:
        SettingError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise SettingError(setting, path, *_unread(exc)) from None


def authorities(setting: str, path: str) -> str:
    """Return the certificates of the authorities in the file that a setting names.

    Raises:
        SettingError: it holds none.
    """
    blocks = b"\n".join(_blocks(content(setting, path), b"CERTIFICATE"))
    try:
        text = blocks.decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        text = ""
    if not text:
        raise SettingError(setting, path, "holds no certificate of an authority", _PEM)
    return text


def no_certificate(setting: str, path: str) -> SettingError:
    """Return the error of a file that holds something else."""
    return SettingError(setting, path, *_NO_CERTIFICATE)


def _unread(exc: Exception) -> tuple[str, str]:
    if isinstance(exc, FileNotFoundError):
        return "no such file", "Name one that is there, or leave it out."
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return f"cannot be read: {why}", "Let the user that Headway runs as read it."


def _blocks(content: bytes, kind: bytes) -> list[bytes]:
    """Return the blocks of a PEM file whose label ends in `kind`."""
    return [found[0] for found in _BLOCK.finditer(content) if found[1].endswith(kind)]


def _check_chain(setting: str, path: str, chain: bytes) -> bytes:
    """Return the first certificate of a file, in DER."""
    blocks = _blocks(chain, b"CERTIFICATE")
    if not blocks:
        reason = "holds a key, and no certificate" if _blocks(chain, b"PRIVATE KEY") else _NO_CERTIFICATE[0]
        raise SettingError(setting, path, reason, _PEM)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=b"\n".join(blocks).decode("ascii"))
        return ssl.PEM_cert_to_DER_cert(blocks[0].decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise no_certificate(setting, path) from None


def _check_key(setting: str, path: str, key: bytes, key_setting: str) -> None:
    keys = _blocks(key, b"PRIVATE KEY")
    if not keys:
        hint = _NO_KEY[1] if setting == key_setting else f"Name the file of its key with {flag(key_setting)}."
        raise SettingError(setting, path, _NO_KEY[0], hint)
    if any(b"ENCRYPTED" in key for key in keys):
        raise SettingError(setting, path, *_ENCRYPTED)


def validity(der: bytes) -> tuple[float, float]:
    """Return the first and last instant of a certificate's time, in Unix seconds, from its encoding (X.509 in DER, RFC 5280, section 4.1).

    Raises:
        ValueError: it is no certificate.
    """
    body, _ = _element(_element(der, _SEQUENCE)[0], _SEQUENCE)
    if body[:1] == bytes([_VERSION]):
        _, body = _element(body)
    for _ in ("serial number", "signature algorithm", "issuer"):
        _, body = _element(body)
    times, _ = _element(body, _SEQUENCE)
    first, rest = _instant(times)
    last, _ = _instant(rest)
    return first, last


def _element(data: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """Return the content of the first element, which must have the tag if one is given, and what follows it."""
    if len(data) < 2 or (tag is not None and data[0] != tag):
        raise ValueError("not a certificate")
    length, begin = data[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(data[2:begin], "big")
    if length > len(data) - begin:
        raise ValueError("not a certificate")
    return data[begin : begin + length], data[begin + length :]


def _instant(data: bytes) -> tuple[float, bytes]:
    text, rest = _element(data)
    shown = text.decode("ascii")
    if data[0] == _UTC_TIME:
        shown = ("19" if int(shown[:2]) >= _CENTURY else "20") + shown
    elif data[0] != _TIME:
        raise ValueError("not a certificate")
    return datetime.strptime(shown, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp(), rest
