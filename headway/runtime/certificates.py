"""Certificates of this process, for its ports and for a remote API, read from PEM files.

The files are checked every second. If they have changed, and the next check finds no further change, all are read, and are used if
they fit together. So a new certificate without its key changes nothing. Open connections keep the certificates they started with.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from headway.config import flag
from headway.errors import SettingError
from headway.runtime.counters import TlsCounts
from headway.runtime.logger import get_logger
from headway.runtime.periodic import Periodic, PeriodicResource
from headway.runtime.shared_files import Stamp, stamp

log = get_logger(__name__)

CHECK_FILES_EVERY = 1.0  # Seconds between two checks of the files.
PROTOCOLS = ("http/1.1", "h2")  # Protocols of ports, by their ALPN names.
DAY = 86_400.0
NEAR = 14 * DAY  # The log warns this long before a certificate expires, or a sixth of its validity if that is less.
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL)
_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # Permissions on a key file that only its owner should have.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # OpenSSL's reason codes.

_PEM = "Name a file in PEM format, which begins with -----BEGIN CERTIFICATE-----."
_NO_CERTIFICATE = "is not a certificate"
_NO_KEY = (
    "holds no private key that can be read",
    "Name a file in PEM format, with -----BEGIN PRIVATE KEY----- in it.",
)
_ENCRYPTED = (
    "is encrypted, but nobody can type its password at a restart",
    "Decrypt it with openssl pkey -in FILE -out KEY, and let only the user that Headway runs as read KEY.",
)
_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18

T = TypeVar("T")


class OwnCertificate(msgspec.Struct, frozen=True):
    """Facts about the certificate that this process presents."""

    path: str
    key_path: str
    open_key: str  # Permissions of the key file if other users than its owner may use it, otherwise empty.
    fingerprint: str  # First 16 hex digits of the SHA-256.
    begins: float
    ends: float  # Unix seconds. The certificate is valid from `begins` to `ends`.

    @classmethod
    def of(cls, pair: Pair) -> OwnCertificate:
        """Return the facts about a certificate. Raises SettingError if its dates can't be read."""
        try:
            begins, ends = validity(pair.first)
        except ValueError:
            raise SettingError(pair.setting, pair.path, _NO_CERTIFICATE, _PEM) from None
        return cls(pair.path, pair.key_path, pair.open_key, hashlib.sha256(pair.first).hexdigest()[:16], begins, ends)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS parameters of a client, in PEM. Each reading of the files creates a new object."""

    context: ssl.SSLContext
    authorities: bytes | None = None  # Trusted authorities; None for the system's.
    certificate: bytes | None = None  # Certificate to present, with any intermediate certificates.
    key: bytes | None = field(default=None, repr=False)


class CertificateFiles(PeriodicResource, ABC, Generic[T]):
    """Base class for certificates in up to three files, which an operator may replace. An empty path names no file. The
    constructor reads the files, and raises SettingError if one is bad. `current` is the result of the last successful
    reading. `now` returns Unix seconds."""

    rereads = ""
    _purpose: ClassVar[str]  # What follows "certificate" in log lines, such as " for the remote API".
    _refuser: ClassVar[str]  # In log lines: who refuses an invalid certificate, such as "clients refuse".

    def __init__(
        self, first: str, second: str, third: str, counts: TlsCounts, now: Callable[[], float] = time.time
    ) -> None:
        name = f"certificates{self._purpose}"
        super().__init__(Periodic(name, self.look, time.monotonic, what="", every=CHECK_FILES_EVERY))
        self._files, self.counts, self._now = (first, second, third), counts, now
        self._paths = tuple(Path(path) for path in dict.fromkeys(self._files) if path)
        self._seen = self._read = self._stamps()
        self._logged = ""
        self._reminded = -DAY
        self._own: OwnCertificate | None = None
        self.current: T
        self._take(self._load())

    async def reread(self) -> None:
        """Read the files now. If they can't be used, raise SettingError and leave `current` as it was."""
        stamps = self._stamps()
        self._take(await asyncio.to_thread(self._load))
        self._seen = self._read = stamps
        self._logged = ""

    async def look(self) -> None:
        """Check the files, and read them if a change has settled."""
        stamps = await asyncio.to_thread(self._stamps)
        settled, self._seen = stamps == self._seen, stamps
        if settled and stamps != self._read:
            try:
                await self.reread()
            except SettingError as exc:
                if str(exc) != self._logged:
                    self._logged = str(exc)
                    event = f"the changed certificates{self._purpose} cannot be used; the previous ones stay in use"
                    log.error(event, error=self._logged)
        self._remind()

    @abstractmethod
    def _load(self) -> tuple[T, OwnCertificate | None]:
        """Read and check all files, in a thread. Return the new `current`, and the certificate to present, if any."""

    @abstractmethod
    def _ends(self, when: float) -> None:
        """Record when the certificate to present expires, in Unix seconds."""

    def _take(self, loaded: tuple[T, OwnCertificate | None]) -> None:
        self.current, own = loaded
        self._own = own
        self._reminded = -DAY
        if own is None:
            log.info(f"certificates{self._purpose} read", files=[str(path) for path in self._paths])
            return
        self._ends(own.ends)
        log.info(f"certificate{self._purpose} read", file=own.path, sha256=own.fingerprint, ends=_date(own.ends))
        if own.open_key:
            hint = "Let only the user that Headway runs as read it: chmod 600"
            event = f"the key of the certificate{self._purpose} can be read or changed by others"
            log.warning(event, file=own.key_path, mode=own.open_key, hint=hint)
        self._remind()

    def _remind(self) -> None:
        """Log, at most once a day, that the certificate expires soon or isn't valid now."""
        own, now = self._own, self._now()
        if own is None or now < self._reminded + DAY:
            return
        if not own.begins <= now < own.ends:
            log.error(f"the certificate{self._purpose} is not valid now, and {self._refuser} it", file=own.path,
                      begins=_date(own.begins), ends=_date(own.ends))  # fmt: skip
        elif now >= own.ends - min(NEAR, (own.ends - own.begins) / 6):
            log.warning(f"the certificate{self._purpose} expires soon", file=own.path, ends=_date(own.ends))
        else:
            return
        self._reminded = now

    def _stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(stamp(path) for path in self._paths)


class Certificates(CertificateFiles[dict[str, ssl.SSLContext]]):
    """Certificate of all ports of a process. `first` is the path of the certificate with its intermediate certificates.
    `second` is the path of the key, or empty if the key is in the same file. `third` is the path of the authorities that issue
    client certificates, or empty if clients need no certificate."""

    rereads = "certificates of the ports"
    _purpose, _refuser = "", "clients refuse"

    def context(self, protocol: str) -> ssl.SSLContext:
        return self.current[protocol]

    def _load(self) -> tuple[dict[str, ssl.SSLContext], OwnCertificate]:
        certificate, key, client_ca = self._files
        pair = Pair("tls_cert", certificate, "tls_key", key)
        trusted = authorities("tls_client_ca", client_ca) if client_ca else ""
        contexts = {protocol: _context(protocol, pair, trusted) for protocol in PROTOCOLS}
        return contexts, OwnCertificate.of(pair)

    def _ends(self, when: float) -> None:
        self.counts.ends = when


class RemoteCertificates(CertificateFiles[ClientTls]):
    """Certificates for connections to a remote API. `first` is the path of the authorities to trust, or empty to trust
    those of the system. `second` is the path of the certificate to present, or empty to present none.
    `third` is the path of the certificate's key, or empty if the key is in the same file."""

    rereads = "certificates for the remote API"
    _purpose, _refuser = " for the remote API", "the API refuses"

    def _load(self) -> tuple[ClientTls, OwnCertificate | None]:
        ca, certificate, key = self._files
        trusted = authorities("remote_ca", ca) if ca else None
        context = ssl.create_default_context(cadata=trusted)
        ca_pem = trusted.encode() if trusted is not None else None
        if not certificate:
            return ClientTls(context, ca_pem), None
        pair = Pair("remote_cert", certificate, "remote_key", key)
        pair.show_in(context)
        return ClientTls(context, ca_pem, pair.chain, pair.key), OwnCertificate.of(pair)

    def _ends(self, when: float) -> None:
        self.counts.remote_ends = when


def _context(protocol: str, pair: Pair, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([protocol])
    pair.show_in(context)
    if trusted:
        context.load_verify_locations(cadata=trusted)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class Pair:
    """A certificate and its key, read and checked. Raises SettingError if a file can't be used.

    `setting` and `key_setting` are the settings that name the files. `path` is the file of the certificate and its
    intermediate certificates. The argument `key` is the file of the key, or empty if that is in the same file. The
    attributes `chain` and `key` are PEM text. `first` is the certificate itself, in DER. For `open_key`, see
    OwnCertificate."""

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
        """Load the certificate and key into a context. Raises SettingError if they don't match, or TLS can't use them."""

        def refuse_encrypted() -> str:
            raise SettingError(self._key_setting, self.key_path, *_ENCRYPTED)

        try:
            context.load_cert_chain(self.path, self.key_path, refuse_encrypted)
        except ssl.SSLError as exc:
            if exc.reason in _MISMATCHES:
                reason = f"is not the key of the certificate {self.path}"
                hint = "Name a certificate and its own key."
                raise SettingError(self._key_setting, self.key_path, reason, hint) from None
            if exc.reason in (None, "PEM_LIB") or "PEM" in str(exc):
                raise SettingError(self._key_setting, self.key_path, *_NO_KEY) from None
            reason = f"can't be used for TLS: {(exc.reason or str(exc)).lower().replace('_', ' ')}"
            raise SettingError(self.setting, self.path, reason, "Have a stronger certificate issued.") from None
        except OSError as exc:
            raise SettingError(self._key_setting, self.key_path, *_unread(exc)) from None


def content(setting: str, path: str) -> bytes:
    """Read the file that a setting names. Raises SettingError if it can't be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise SettingError(setting, path, *_unread(exc)) from None


def authorities(setting: str, path: str) -> str:
    """Return the authorities' certificates, in PEM, from the file that a setting names. Raises SettingError if there are none."""
    blocks = b"\n".join(_blocks(content(setting, path), b"CERTIFICATE"))
    try:
        text = blocks.decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        text = ""
    if not text:
        raise SettingError(setting, path, "contains no certificate of an authority", _PEM)
    return text


def _unread(exc: Exception) -> tuple[str, str]:
    if isinstance(exc, FileNotFoundError):
        return "no such file", "Name an existing file, or leave it out."
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return f"cannot be read: {reason}", "Let the user that Headway runs as read it."


def _blocks(content: bytes, kind: bytes) -> list[bytes]:
    return [block[0] for block in _BLOCK.finditer(content) if block[1].endswith(kind)]


def _check_chain(setting: str, path: str, chain: bytes) -> bytes:
    blocks = _blocks(chain, b"CERTIFICATE")
    if not blocks:
        reason = "holds a key, but no certificate" if _blocks(chain, b"PRIVATE KEY") else _NO_CERTIFICATE
        raise SettingError(setting, path, reason, _PEM)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=b"\n".join(blocks).decode("ascii"))
        return ssl.PEM_cert_to_DER_cert(blocks[0].decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise SettingError(setting, path, _NO_CERTIFICATE, _PEM) from None


def _check_key(setting: str, path: str, key: bytes, key_setting: str) -> None:
    keys = _blocks(key, b"PRIVATE KEY")
    if not keys:
        hint = _NO_KEY[1] if setting == key_setting else f"Name the file of its key with {flag(key_setting)}."
        raise SettingError(setting, path, _NO_KEY[0], hint)
    if any(b"ENCRYPTED" in key for key in keys):
        raise SettingError(setting, path, *_ENCRYPTED)


def validity(der: bytes) -> tuple[float, float]:
    """Return the start and end of a DER certificate's validity in Unix seconds (RFC 5280, section 4.1). Raises ValueError."""
    body, _ = _element(_element(der, _SEQUENCE)[0], _SEQUENCE)
    if body[:1] == bytes([_VERSION]):
        _, body = _element(body)
    for _ in ("serial number", "signature algorithm", "issuer"):
        _, body = _element(body)
    times, _ = _element(body, _SEQUENCE)
    first, rest = _time(times)
    last, _ = _time(rest)
    return first, last


def _element(data: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """Return the content of the first DER element, which must have `tag` if given, and the data after the element."""
    if len(data) < 2 or (tag is not None and data[0] != tag):
        raise ValueError("not a certificate")
    length, begin = data[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(data[2:begin], "big")
    if length > len(data) - begin:
        raise ValueError("not a certificate")
    return data[begin : begin + length], data[begin + length :]


def _time(data: bytes) -> tuple[float, bytes]:
    text, rest = _element(data)
    shown = text.decode("ascii")
    if data[0] == _UTC_TIME:  # Its years have two digits; from 50 on, they belong to the last century.
        shown = ("19" if int(shown[:2]) >= 50 else "20") + shown
    elif data[0] != _TIME:
        raise ValueError("not a certificate")
    return datetime.strptime(shown, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp(), rest
