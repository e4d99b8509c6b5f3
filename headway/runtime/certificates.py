"""Certificate of this process's ports, with its key and the authorities of its clients.

Each new connection gets what is the latest by then; those that are open keep theirs.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable

from headway.runtime.certificate_files import CertificateFiles, OwnCertificate, look_pause
from headway.runtime.counters import Counters
from headway.runtime.pem import Pair, authorities

PROTOCOLS = ("http/1.1", "h2")
"""Protocols that a port may speak, as clients name them in the handshake."""


class Certificates(CertificateFiles[dict[str, ssl.SSLContext]]):
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
        pause: Callable[[], Awaitable[None]] = look_pause,
    ) -> None:
        self._files = certificate, key, client_ca
        self._counters = counters
        super().__init__("", "clients refuse", self._files, now, pause)

    def context(self, protocol: str) -> ssl.SSLContext:
        """Context for a new connection to a port that speaks one of PROTOCOLS."""
        return self.current[protocol]

    def _load(self) -> tuple[dict[str, ssl.SSLContext], OwnCertificate]:
        certificate, key, client_ca = self._files
        pair = Pair("tls_cert", certificate, "tls_key", key)
        trusted = authorities("tls_client_ca", client_ca) if client_ca else ""
        contexts = {protocol: _context(protocol, pair, trusted) for protocol in PROTOCOLS}
        return contexts, OwnCertificate.of(pair)

    def _ends(self, when: float) -> None:
        self._counters.certificate_ends = when


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
