"""Certificate of this process's ports, with its key and the authorities of its clients: read from files, and again when they change.

The files are looked at every second. What has changed is read one look later, when it has stopped changing, and taken only if all
of it fits together: a certificate whose key is not there yet leaves what was read before. Each new connection gets what is the
latest by then; those that are open keep theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from headway.errors import SettingError
from headway.runtime.certificate_dates import validity
from headway.runtime.counters import Counters
from headway.runtime.supervisor import Supervisor

log = structlog.get_logger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks at the files."""

DAY = 86_400.0
NEAR = 14 * DAY
"""Seconds before its end from which on a certificate is warned of; at most a sixth of its whole time."""

PROTOCOLS = ("http/1.1", "h2")
"""Protocols that a port may speak, as clients name them in the handshake."""

_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL)
_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""Rights to the file of a key that nobody but its user, and perhaps a group that reads it, should have."""

_Stamps = tuple[tuple[int, int, int] | None, ...]


async def _pause() -> None:
    await asyncio.sleep(LOOK_EVERY)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Content of the files, ready for use.

    Attributes:
        contexts: a context for each of PROTOCOLS.
        begins, ends: time of the certificate, in Unix seconds.
        fingerprint: beginning of its SHA-256.
        open_key: rights to the file of the key, if others have any; else empty.
    """

    contexts: dict[str, ssl.SSLContext]
    begins: float
    ends: float
    fingerprint: str
    open_key: str


class Certificates:
    """Certificates of all ports of a process; a resource that an operator may change.

    Arguments:
        certificate: path of the certificate, and of those between it and an authority that clients know.
        key: path of its key; empty: the same file.
        client_ca: path of the authorities of which clients need a certificate; empty: clients need none.
        counters: counters that say when the certificate ends.
        now: Unix seconds.
        pause: waits between two looks.

    Raises:
        SettingError: a file cannot be used.
    """

    rereads = "certificates of the ports"

    def __init__(
        self,
        certificate: str,
        key: str,
        client_ca: str,
        counters: Counters,
        now: Callable[[], float] = time.time,
        pause: Callable[[], Awaitable[None]] = _pause,
    ) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._counters = counters
        self._now, self._pause = now, pause
        self._paths = tuple(Path(path) for path in dict.fromkeys((certificate, key, client_ca)) if path)
        self._seen = self._read = self._stamps()
        self._told = ""
        self._reminded = -DAY
        self._take(self._load())

    def context(self, protocol: str) -> ssl.SSLContext:
        """Context for a new connection to a port that speaks one of PROTOCOLS."""
        return self._loaded.contexts[protocol]

    async def open(self) -> None:
        """Do nothing: the files were read when this was made, so that a start with a wrong one ends at once."""

    def start(self, supervisor: Supervisor) -> None:
        """Start looking at the files."""
        supervisor.start("certificates", self._watch)

    async def close(self) -> None:
        """Do nothing: the loop has ended."""

    async def reread(self) -> None:
        """Read the files now.

        Raises:
            SettingError: they cannot be used; what was read before goes on.
        """
        stamps = self._stamps()
        self._take(await asyncio.to_thread(self._load))
        self._seen = self._read = stamps
        self._told = ""

    async def look(self) -> None:
        """Look at the files once, and take what has changed since they were read and has settled since the last look."""
        stamps = await asyncio.to_thread(self._stamps)
        settled, self._seen = stamps == self._seen, stamps
        if settled and stamps != self._read:
            try:
                await self.reread()
            except SettingError as exc:
                if str(exc) != self._told:
                    self._told = str(exc)
                    log.error("the changed certificates cannot be used; those read before go on", error=self._told)
        self._remind()

    async def _watch(self) -> None:
        while True:
            await self._pause()
            await self.look()

    def _take(self, loaded: _Loaded) -> None:
        self._loaded = loaded
        self._counters.certificate_ends = loaded.ends
        self._reminded = -DAY
        log.info("certificate read", file=self._certificate, sha256=loaded.fingerprint, ends=_date(loaded.ends))
        if loaded.open_key:
            hint = "Leave it to the user that Headway runs as: chmod 600"
            log.warning("the key of the certificate can be read or changed by others",
                        file=self._key or self._certificate, mode=loaded.open_key, hint=hint)  # fmt: skip
        self._remind()

    def _remind(self) -> None:
        """Log once a day that the certificate ends soon, or is not good now."""
        loaded, now = self._loaded, self._now()
        if now < self._reminded + DAY:
            return
        if not loaded.begins <= now < loaded.ends:
            log.error("the certificate is not valid now, and clients refuse it", file=self._certificate,
                      begins=_date(loaded.begins), ends=_date(loaded.ends))  # fmt: skip
        elif now >= loaded.ends - min(NEAR, (loaded.ends - loaded.begins) / 6):
            log.warning("the certificate ends soon", file=self._certificate, ends=_date(loaded.ends))
        else:
            return
        self._reminded = now

    def _stamps(self) -> _Stamps:
        return tuple(_stamp(path) for path in self._paths)

    def _load(self) -> _Loaded:
        """Read and check all files.

        Raises:
            SettingError: one cannot be used, or two do not fit.
        """
        chain = _content("tls_cert", self._certificate)
        key_name, key_path = ("tls_key", self._key) if self._key else ("tls_cert", self._certificate)
        key = _content(key_name, key_path)
        first = _check_chain(self._certificate, chain)
        _check_key(key_name, key_path, key)
        trusted = _trusted(self._client_ca, _content("tls_client_ca", self._client_ca)) if self._client_ca else ""
        contexts = {protocol: self._context(protocol, key_name, key_path, trusted) for protocol in PROTOCOLS}
        try:
            begins, ends = validity(first)
        except ValueError:
            raise SettingError("tls_cert", self._certificate, *_NO_CERTIFICATE) from None
        mode = stat.S_IMODE(Path(key_path).stat().st_mode)
        open_key = f"{mode:04o}" if mode & _OTHERS else ""
        return _Loaded(contexts, begins, ends, hashlib.sha256(first).hexdigest()[:16], open_key)

    def _context(self, protocol: str, key_name: str, key_path: str, trusted: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols([protocol])

        def refuse_encrypted() -> str:
            raise SettingError(key_name, key_path, *_ENCRYPTED)

        try:
            context.load_cert_chain(self._certificate, self._key or None, refuse_encrypted)
        except ssl.SSLError as exc:
            if exc.reason in _MISMATCHES:
                reason = f"is not the key of the certificate {self._certificate}"
                hint = "Name the two that were made together."
                raise SettingError(key_name, key_path, reason, hint) from None
            if exc.reason in (None, "PEM_LIB") or "PEM" in str(exc):
                raise SettingError(key_name, key_path, *_NO_KEY) from None
            reason = f"will not do for TLS: {(exc.reason or str(exc)).lower().replace('_', ' ')}"
            raise SettingError("tls_cert", self._certificate, reason, "Have a stronger one issued.") from None
        except OSError as exc:
            raise SettingError(key_name, key_path, *_unread(exc)) from None
        if trusted:
            context.load_verify_locations(cadata=trusted)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""Reasons of OpenSSL where a key is that of another certificate."""

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


def _content(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as exc:
        raise SettingError(name, path, *_unread(exc)) from None


def _unread(exc: Exception) -> tuple[str, str]:
    if isinstance(exc, FileNotFoundError):
        return "no such file", "Name one that is there, or leave it out."
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return f"cannot be read: {why}", "Let the user that Headway runs as read it."


def _blocks(content: bytes, kind: bytes) -> list[bytes]:
    """Blocks of a PEM file whose label ends in `kind`."""
    return [found[0] for found in _BLOCK.finditer(content) if found[1].endswith(kind)]


def _check_chain(path: str, content: bytes) -> bytes:
    """First certificate of a file, in DER."""
    blocks = _blocks(content, b"CERTIFICATE")
    if not blocks:
        reason = "holds a key, and no certificate" if _blocks(content, b"PRIVATE KEY") else _NO_CERTIFICATE[0]
        raise SettingError("tls_cert", path, reason, _PEM)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=b"\n".join(blocks).decode("ascii"))
        return ssl.PEM_cert_to_DER_cert(blocks[0].decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise SettingError("tls_cert", path, *_NO_CERTIFICATE) from None


def _check_key(name: str, path: str, content: bytes) -> None:
    keys = _blocks(content, b"PRIVATE KEY")
    if not keys:
        hint = _NO_KEY[1] if name == "tls_key" else "Name the file of its key with --tls-key."
        raise SettingError(name, path, _NO_KEY[0], hint)
    if any(b"ENCRYPTED" in key for key in keys):
        raise SettingError(name, path, *_ENCRYPTED)


def _trusted(path: str, content: bytes) -> str:
    """Certificates of the authorities in a file."""
    blocks = b"\n".join(_blocks(content, b"CERTIFICATE"))
    try:
        text = blocks.decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        text = ""
    if not text:
        raise SettingError("tls_client_ca", path, "holds no certificate of an authority", _PEM)
    return text


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Stamp that tells one content of a file from the next: modification time in ns, size, inode."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
