"""Certificates of this process: for its ports, and towards a remote API.

New connections use the latest ones; open connections keep theirs.

The files are looked at every second. A change is read once a look finds it settled, and used only if all files
fit together: until a new certificate's key is there, the old pair stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec

from headway.errors import SettingError
from headway.runtime.counters import TlsCounts
from headway.runtime.file_watcher import Stamp, stamp
from headway.runtime.logger import get_logger
from headway.runtime.pem import Pair, authorities, no_certificate, validity
from headway.runtime.periodic import Periodic, PeriodicResource

log = get_logger(__name__)

CHECK_FILES_EVERY = 1.0
"""Seconds between two looks at the files."""

PROTOCOLS = ("http/1.1", "h2")
"""Protocols that a port may speak, as clients name them in the handshake."""

DAY = 86_400.0
NEAR = 14 * DAY
"""Seconds before a certificate's end from which the log warns; at most a sixth of its whole time."""

T = TypeVar("T")
_Stamps = tuple[Stamp | None, ...]


class OwnCertificate(msgspec.Struct, frozen=True):
    """Facts about the certificate that this process shows.

    Attributes:
        path: path of its file.
        key_path: path of the file that holds its key.
        open_key: permissions on that file, if others have any; else empty.
        fingerprint: beginning of its SHA-256.
        begins, ends: Unix seconds between which it is valid.
    """

    path: str
    key_path: str
    open_key: str
    fingerprint: str
    begins: float
    ends: float

    @classmethod
    def of(cls, pair: Pair) -> OwnCertificate:
        """Return the facts about the certificate of a pair.

        Raises:
            SettingError: it is no certificate.
        """
        try:
            begins, ends = validity(pair.first)
        except ValueError:
            raise no_certificate(pair.setting, pair.path) from None
        return cls(pair.path, pair.key_path, pair.open_key, hashlib.sha256(pair.first).hexdigest()[:16], begins, ends)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Client side of TLS as its files were when read; each reading makes a new one.

    Attributes:
        context: context of a connection, which checks the other side's certificate and name.
        authorities: text of the authorities that are trusted, in PEM; None: those of the system.
        certificate: text of the certificate that is shown and those up to an authority, in PEM; None: none is shown.
        key: text of its key, in PEM; None: there is none.
    """

    context: ssl.SSLContext
    authorities: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class CertificateFiles(PeriodicResource, ABC, Generic[T]):
    """Base of what is read from three certificate files, which an operator may change.

    The files are read at once, so that a start with a wrong one fails.

    Arguments:
        first, second, third: paths of the files, as the subclass says; an empty one is left out.
        counts: counts that say when the certificate ends.
        now: Unix seconds.

    Attributes:
        counts: see the argument.
        current: what was read last.

    Raises:
        SettingError: a file cannot be used.
    """

    rereads = ""
    _purpose: ClassVar[str]
    """What follows "certificate" in the log, such as " for the remote API"; empty for the ports."""
    _refuser: ClassVar[str]
    """Subject and verb for the refusal of an invalid certificate."""

    def __init__(
        self,
        first: str,
        second: str,
        third: str,
        counts: TlsCounts,
        now: Callable[[], float] = time.time,
    ) -> None:
        name = f"certificates{self._purpose}"
        super().__init__(Periodic(name, self.look, time.monotonic, what="", every=CHECK_FILES_EVERY))
        self._files, self.counts, self._now = (first, second, third), counts, now
        self._paths = tuple(Path(path) for path in dict.fromkeys(self._files) if path)
        self._seen = self._read = self._stamps()
        self._told = ""
        self._reminded = -DAY
        self._own: OwnCertificate | None = None
        self.current: T
        self._take(self._load())

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
        """Look at the files, and read them if they changed and have settled since the last look."""
        stamps = await asyncio.to_thread(self._stamps)
        settled, self._seen = stamps == self._seen, stamps
        if settled and stamps != self._read:
            try:
                await self.reread()
            except SettingError as exc:
                if str(exc) != self._told:
                    self._told = str(exc)
                    event = f"the changed certificates{self._purpose} cannot be used; those read before go on"
                    log.error(event, error=self._told)
        self._remind()

    @abstractmethod
    def _load(self) -> tuple[T, OwnCertificate | None]:
        """Read and check all files, in a thread. Returns what they hold, and the certificate that is shown, if any.

        Raises:
            SettingError: one cannot be used, or two do not fit.
        """

    @abstractmethod
    def _ends(self, when: float) -> None:
        """Note the Unix second at which the shown certificate ends."""

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
            hint = "Leave it to the user that Headway runs as: chmod 600"
            event = f"the key of the certificate{self._purpose} can be read or changed by others"
            log.warning(event, file=own.key_path, mode=own.open_key, hint=hint)
        self._remind()

    def _remind(self) -> None:
        """Log once a day that the certificate ends soon, or isn't valid now."""
        own, now = self._own, self._now()
        if own is None or now < self._reminded + DAY:
            return
        if not own.begins <= now < own.ends:
            log.error(f"the certificate{self._purpose} is not valid now, and {self._refuser} it", file=own.path,
                      begins=_date(own.begins), ends=_date(own.ends))  # fmt: skip
        elif now >= own.ends - min(NEAR, (own.ends - own.begins) / 6):
            log.warning(f"the certificate{self._purpose} ends soon", file=own.path, ends=_date(own.ends))
        else:
            return
        self._reminded = now

    def _stamps(self) -> _Stamps:
        return tuple(stamp(path) for path in self._paths)


class Certificates(CertificateFiles[dict[str, ssl.SSLContext]]):
    """Certificate of all ports of a process.

    Arguments:
        first: path of the certificate, and of those between it and an authority that clients know.
        second: path of its key; empty: the same file.
        third: path of the authorities that must have signed clients' certificates; empty: clients need none.

    Raises:
        SettingError: a file cannot be used.
    """

    rereads = "certificates of the ports"
    _purpose, _refuser = "", "clients refuse"

    def context(self, protocol: str) -> ssl.SSLContext:
        """Return the context for a new connection to a port that speaks one of PROTOCOLS."""
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
    """Certificates towards a remote API. At least one path is given.

    Arguments:
        first: path of the authorities to trust; empty: those of the system.
        second: path of the certificate to show, and of those between it and an authority; empty: none.
        third: path of its key; empty: the same file.

    Raises:
        SettingError: a file cannot be used.
    """

    rereads = "certificates for the remote API"
    _purpose, _refuser = " for the remote API", "the API refuses"

    def _load(self) -> tuple[ClientTls, OwnCertificate | None]:
        ca, certificate, key = self._files
        trusted = authorities("remote_ca", ca) if ca else None
        context = ssl.create_default_context(cadata=trusted)
        given = trusted.encode() if trusted is not None else None
        if not certificate:
            return ClientTls(context, given), None
        pair = Pair("remote_cert", certificate, "remote_key", key)
        pair.show_in(context)
        return ClientTls(context, given, pair.chain, pair.key), OwnCertificate.of(pair)

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
