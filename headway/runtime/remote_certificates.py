"""Certificates towards a remote API: the authorities that are trusted, and the certificate that is shown."""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headway.runtime.certificate_files import CertificateFiles, OwnCertificate, look_pause
from headway.runtime.counters import Counters
from headway.runtime.pem import Pair, authorities


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Side of a client in TLS, as its files were at one time. Each reading of the files makes another one.

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


class RemoteCertificates(CertificateFiles[ClientTls]):
    """Certificates towards a remote API; a resource that an operator may change. At least one path is given.

    Arguments:
        ca: path of the authorities to trust; empty: those of the system.
        certificate: path of the certificate to show, and of those between it and an authority; empty: none.
        key: path of its key; empty: the same file.
        counters: counters that say when the certificate ends.
        now: Unix seconds.
        pause: waits between two looks.

    Attributes:
        current: the latest, for new connections.

    Raises:
        SettingError: a file cannot be used.
    """

    rereads = "certificates for the remote API"

    def __init__(
        self,
        ca: str,
        certificate: str,
        key: str,
        counters: Counters,
        now: Callable[[], float] = time.time,
        pause: Callable[[], Awaitable[None]] = look_pause,
    ) -> None:
        self._files = ca, certificate, key
        self._counters = counters
        super().__init__(" for the remote API", "the API refuses", self._files, now, pause)

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
        self._counters.remote_certificate_ends = when
