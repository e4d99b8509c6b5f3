"""TLS between a socket and the protocol of a port.

    NEW ──first byte──▶ WAITING ─turn─▶ HANDSHAKE ──▶ OPEN ──▶ ENDED
      │                    ▲───────────────┘ │
      └─no TLS─▶ PLAIN                       └─failed─▶ ENDED

The protocol learns of a connection before the handshake, so a connection whose handshake hangs is counted, and times out like any idle
one. Data that the protocol writes during the handshake is sent afterwards. The event loop's own TLS would announce a connection only
after its handshake, and can't close one direction only. Client addresses take turns (`headway.runtime.fair_turns`) at handshake
steps, which take 0.1 ms to several ms each, depending on the certificate's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from headway.runtime.certificates import Certificates
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from headway.runtime.logger import get_logger

log = get_logger(__name__)

LINGER = 1.0  # Seconds to keep a connection after a failed handshake, so that the client can read the alert.
LOG_EVERY = 60.0  # Minimum time in seconds between two log lines about failed handshakes.
NEW, WAITING, HANDSHAKE, OPEN, PLAIN, ENDED = range(6)
_RECORD = 16_384  # Maximum size in bytes of a TLS record.
_HANDSHAKE_RECORD = 0x16
_TEXT = frozenset(b"\r\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")  # First bytes of text protocols.
_REASONS = {  # Labels for failed handshakes, by OpenSSL reason.
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "CERTIFICATE_VERIFY_FAILED": "bad_certificate",
    "UNSUPPORTED_PROTOCOL": "old_version",
    "VERSION_TOO_LOW": "old_version",
    "NO_SHARED_CIPHER": "no_shared_cipher",
    "NO_SUITABLE_SIGNATURE_ALGORITHM": "no_shared_cipher",
    "HTTP_REQUEST": "plain",
    "TLSV1_ALERT_UNKNOWN_CA": "distrusted",
    "SSLV3_ALERT_BAD_CERTIFICATE": "distrusted",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "distrusted",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "distrusted",
}
REASONS = (*dict.fromkeys(_REASONS.values()), "malformed", "closed", "unfinished")  # All labels for failed handshakes.


class TlsPort:
    """TLS on one port. `label` is the port's name in the log and in metrics."""

    def __init__(self, certificates: Certificates, protocol: str, label: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.line = FairTurns(loop=loop, budget=MILLISECOND, rests=False)
        self._certificates, self._protocol, self._label = certificates, protocol, label
        self._failed: Counter[str] = Counter()
        self._logged_at = -LOG_EVERY

    def around(
        self, make: Callable[[], asyncio.Protocol], refuse_plain: Callable[[Any], None]
    ) -> Callable[[], asyncio.Protocol]:
        """Return the protocol factory for a listening socket. `make` creates the protocol above TLS. If a client doesn't
        speak TLS, `refuse_plain` is called with that protocol, to answer in plain text."""
        return lambda: TlsTransport(self, make(), refuse_plain)

    @property
    def context(self) -> ssl.SSLContext:
        return self._certificates.context(self._protocol)

    def failed(self, reason: str) -> None:
        """Count a failed handshake, and log the counts at most every LOG_EVERY seconds."""
        self._certificates.counts.failures[self._label, reason] += 1
        if reason in ("closed", "unfinished"):  # Load balancers that check for an open port cause these all the time.
            return
        self._failed[reason] += 1
        now = self.loop.time()
        if now >= self._logged_at + LOG_EVERY:
            log.warning("TLS handshakes with clients are failing", port=self._label, times=dict(self._failed))
            self._failed.clear()
            self._logged_at = now


class TlsSession:
    """TLS of one connection, between two buffers: `incoming` takes the client's data, and `outgoing` has the data to send."""

    def __init__(self) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl_object: Any = None  # None until the handshake begins, because it costs as much as a handshake step.

    @property
    def has_unread(self) -> bool:
        return bool(self.incoming.pending or self.ssl_object.pending())

    def shake_hands(self, port: TlsPort) -> bool:
        """Run one step of the handshake. Return True once it is done. Raises SSLError if it fails."""
        if self.ssl_object is None:
            self.ssl_object = port.context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        try:
            self.ssl_object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self) -> tuple[list[bytes], bool]:
        """Return the data received, in parts, and True if the client has ended its side. Raises SSLError for invalid TLS."""
        tls, incoming, parts = self.ssl_object, self.incoming, list[bytes]()
        try:
            while incoming.pending or tls.pending():
                part = tls.read(_RECORD)
                if not part:
                    return parts, True
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            return parts, True
        return parts, False

    def encrypt(self, data: bytes | bytearray | memoryview[Any]) -> None:
        tls, length = self.ssl_object, len(data)
        sent = tls.write(data) if length else 0
        if sent < length:
            rest = memoryview(data)
            while sent < length:
                sent += tls.write(rest[sent:])

    def end(self) -> None:
        """Write a close_notify alert: no more data follows."""
        with contextlib.suppress(ssl.SSLError):  # The client hasn't ended its side.
            self.ssl_object.unwrap()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """Sits between the socket's transport and the protocol above: a protocol to the former, a transport to the latter."""

    def __init__(self, port: TlsPort, protocol: asyncio.Protocol, refuse_plain: Callable[[Any], None]) -> None:
        super().__init__()
        self._port = port
        self._protocol: asyncio.Protocol | None = protocol
        self._refuse_plain = refuse_plain
        self._state = NEW
        self._address = ""
        self._unsent: list[bytes] = []
        self._tls = TlsSession()
        self._wants_eof = self._paused = False

    # Called by the socket's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announce the connection to the protocol above, before the handshake."""
        self._raw = cast(asyncio.Transport, transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if self._protocol is not None:
            self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        """Decrypt data, or use it for the handshake. Data that arrives after TLS has ended is dropped."""
        state = self._state
        if state == OPEN:
            self._tls.incoming.write(data)
            self._read()
        elif state < OPEN:
            if state == NEW and data[0] != _HANDSHAKE_RECORD and data[0] in _TEXT:
                self._state = PLAIN
                self._port.failed("plain")
                self._refuse_plain(self._protocol)
                return
            self._tls.incoming.write(data)
            if self._state != WAITING:
                self._state = WAITING
                self._raw.pause_reading()
                self._port.line.wait(self._address, self.take_turn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("closed")
        protocol, self._protocol = self._protocol, None
        self._unsent.clear()
        if protocol is not None:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def take_turn(self) -> None:
        if self._state == WAITING:
            self._state = HANDSHAKE
            if not self._raw.is_closing():
                self._raw.resume_reading()
                self._shake_hands()

    # Called by the protocol above.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send data, or keep it until the handshake is done."""
        state = self._state
        if state == OPEN:
            self._tls.encrypt(data)
            self._raw.write(self._tls.outgoing.read())
        elif state == PLAIN:
            self._raw.write(data)
        elif state < OPEN:
            self._unsent.append(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Tell the client that no more data follows, and ignore any more data from it."""
        state = self._state
        if state < OPEN:
            self._wants_eof = True
            return
        self._say_end()
        if not self._raw.is_closing():
            self._end_sending()

    def close(self) -> None:
        self._end("unfinished")
        self._raw.close()

    def abort(self) -> None:
        self._end("unfinished")
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def pause_reading(self) -> None:
        """Stop passing data to the protocol. A handshake continues."""
        self._paused = True
        if self._state == OPEN:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Pass data to the protocol again, including data that arrived since `pause_reading`."""
        self._paused = False
        if self._state == OPEN and not self._raw.is_closing():
            self._raw.resume_reading()
            if self._tls.has_unread:
                self._port.loop.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket, or the `ssl_object` once the handshake has begun."""
        if name == "ssl_object":
            return default if self._tls.ssl_object is None else self._tls.ssl_object
        return self._raw.get_extra_info(name, default)

    # Steps.

    def _shake_hands(self) -> None:
        try:
            done = self._tls.shake_hands(self._port)
        except ssl.SSLError as exc:
            self._flush()  # Sends the alert, which tells the client the reason.
            self._end(_REASONS.get(exc.reason or "", "malformed"))
            if not self._raw.is_closing():
                self._end_sending()
                self._port.loop.call_later(LINGER, self._raw.abort)
            return
        if done:
            self._opened()
        else:
            self._flush()

    def _opened(self) -> None:
        self._state = OPEN
        for data in self._unsent:
            self._tls.encrypt(data)
        self._unsent.clear()
        self._flush()
        if self._wants_eof:
            self.write_eof()
        elif self._paused:
            self._raw.pause_reading()
        else:
            self._read()

    def _read(self) -> None:
        if self._state != OPEN or self._paused:
            return
        try:
            parts, ended = self._tls.decrypt()
        except ssl.SSLError:  # The data isn't TLS, or was changed in transit.
            self._flush()
            self.abort()
            return
        self._flush()
        if parts and self._protocol is not None:
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if ended:
            self.close()

    def _flush(self) -> None:
        if self._tls.outgoing.pending:
            self._raw.write(self._tls.outgoing.read())

    def _end_sending(self) -> None:
        with contextlib.suppress(OSError):  # The client has reset the connection, so `connection_lost` follows.
            self._raw.write_eof()

    def _say_end(self) -> None:
        if self._state != OPEN:
            return
        self._state = ENDED
        self._tls.end()
        if not self._raw.is_closing():
            self._flush()

    def _end(self, reason: str) -> None:
        """End TLS. An unfinished handshake counts as failed for `reason`."""
        state = self._state
        self._say_end()
        self._state = ENDED
        if state < OPEN:
            self._port.failed(reason)
