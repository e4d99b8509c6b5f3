"""TLS between a socket and the protocol of a port.

    NEW ──first byte──▶ WAITING ─turn─▶ HANDSHAKE ──▶ OPEN ──▶ ENDED
      │                    ▲───────────────┘ │
      └─no TLS─▶ PLAIN                       └─failed─▶ ENDED

The protocol gets its connection before the handshake. So a connection with a hanging handshake is counted and times out like
any silent connection. Data that the protocol writes before the end of the handshake waits until then. The event loop's own TLS
would announce a connection only after its handshake, and can't end a single direction.

Clients' addresses take turns (`headway.runtime.fair_turns`) with the steps of their handshakes. A step takes 0.1 ms to several
ms, depending on the certificate's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

from headway.runtime.certificates import Certificates
from headway.runtime.fair_turns import MILLISECOND, FairTurns
from headway.runtime.logger import get_logger

log = get_logger(__name__)

LINGER = 1.0  # Seconds to keep a connection after a failed handshake, so that the client can read why.
LOG_EVERY = 60.0  # Minimum time in seconds between two log lines about failed handshakes.
NEW, WAITING, HANDSHAKE, OPEN, PLAIN, ENDED = range(6)
_RECORD = 16_384  # Maximum size in bytes of a TLS record.
_HANDSHAKE_RECORD = 0x16
_TEXT = frozenset(b"\r\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""First bytes of clients that speak a text protocol, such as HTTP."""
_REASONS = {
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
"""Labels of failed handshakes, by OpenSSL's reason."""
REASONS = (*dict.fromkeys(_REASONS.values()), "malformed", "closed", "unfinished")  # All labels of failed handshakes.


class TlsPort:
    """TLS of one port. `label` is the port's name in log and metrics."""

    def __init__(self, certificates: Certificates, protocol: str, label: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.line = FairTurns(loop=loop, budget=MILLISECOND, rests=False)
        self._certificates, self._protocol, self._label = certificates, protocol, label
        self._failed: Counter[str] = Counter()
        self._logged_at = -LOG_EVERY

    def around(
        self, make: Callable[[], asyncio.Protocol], refuse_plain: Callable[[Any], None]
    ) -> Callable[[], asyncio.Protocol]:
        """Return the protocol factory for a listening socket. `make` makes the protocol above TLS. `refuse_plain` is called
        with that protocol to answer, without TLS, a client that doesn't speak TLS."""
        return lambda: TlsTransport(self, make(), refuse_plain)

    @property
    def context(self) -> ssl.SSLContext:
        return self._certificates.context(self._protocol)

    def failed(self, reason: str) -> None:
        """Count a failed handshake, and log the counts every LOG_EVERY seconds at most."""
        self._certificates.counts.failures[self._label, reason] += 1
        if reason in ("closed", "unfinished"):  # Load balancers that check for an open port cause these all the time.
            return
        self._failed[reason] += 1
        now = self.loop.time()
        if now >= self._logged_at + LOG_EVERY:
            log.warning("clients fail at the TLS handshake", port=self._label, times=dict(self._failed))
            self._failed.clear()
            self._logged_at = now


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """TLS of one connection, between the socket's transport and the protocol above. It is a protocol to the former, and a
    transport to the latter."""

    def __init__(self, port: TlsPort, protocol: asyncio.Protocol, refuse_plain: Callable[[Any], None]) -> None:
        super().__init__()
        self._port = port
        self._protocol: asyncio.Protocol | None = protocol
        self._refuse_plain = refuse_plain
        self._state = NEW
        self._address = ""
        self._unsent: list[bytes] = []
        self._tls: Any = None
        self._wants_eof = self._paused = False

    # Called by the socket's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announce the connection to the protocol above, before the handshake."""
        self._raw = cast(asyncio.Transport, transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if self._protocol is not None:
            self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        """Decrypt data, or feed it to the handshake. Data after the end is dropped."""
        state = self._state
        if state == OPEN:
            self._incoming.write(data)
            self._read()
        elif state < OPEN:
            if state == NEW and not self._begin(data):
                return
            self._incoming.write(data)
            if self._state != WAITING:
                self._state = WAITING
                self._raw.pause_reading()
                self._port.line.wait(self._address, self.take_turn)

    def eof_received(self) -> bool | None:
        """Close the connection when the client ends its stream."""
        return None

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
                if self._tls is None:  # Made here because it costs as much as a step.
                    self._outgoing = ssl.MemoryBIO()
                    self._tls = self._port.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
                self._shake_hands()

    # Called by the protocol above.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send data, or keep it until the handshake is done."""
        state = self._state
        if state == OPEN:
            self._encrypt(data)
            self._raw.write(self._outgoing.read())
        elif state == PLAIN:
            self._raw.write(data)
        elif state < OPEN:
            self._unsent.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Tell the client that no more data follows, and ignore the client's further data."""
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
        """Pass no data to the protocol. A handshake continues."""
        self._paused = True
        if self._state == OPEN:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Pass data to the protocol again, including the data that came since `pause_reading`."""
        self._paused = False
        if self._state == OPEN and not self._raw.is_closing():
            self._raw.resume_reading()
            if self._incoming.pending or self._tls.pending():
                self._port.loop.call_soon(self._read)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket, or the `ssl_object` once the handshake has begun."""
        if name == "ssl_object":
            return self._tls if self._tls is not None else default
        return self._raw.get_extra_info(name, default)

    # Steps.

    def _begin(self, data: bytes) -> bool:
        """Prepare the handshake. Returns False if the client doesn't speak TLS."""
        if data[0] != _HANDSHAKE_RECORD and data[0] in _TEXT:
            self._state = PLAIN
            self._port.failed("plain")
            self._refuse_plain(self._protocol)
            return False
        self._incoming = ssl.MemoryBIO()
        return True

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as exc:
            self._flush()  # Sends the alert, which says why.
            self._end(_REASONS.get(exc.reason or "", "malformed"))
            if not self._raw.is_closing():
                self._end_sending()
                self._port.loop.call_later(LINGER, self._raw.abort)
        else:
            self._opened()

    def _opened(self) -> None:
        self._state = OPEN
        for data in self._unsent:
            self._encrypt(data)
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
        tls, incoming, parts, ended = self._tls, self._incoming, [], False
        try:
            while incoming.pending or tls.pending():
                part = tls.read(_RECORD)
                if not part:
                    ended = True
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            ended = True
        except ssl.SSLError:  # The data isn't TLS, or was changed on its way.
            self._flush()
            self.abort()
            return
        self._flush()
        if parts and self._protocol is not None:
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if ended:
            self.close()

    def _encrypt(self, data: bytes | bytearray | memoryview[Any]) -> None:
        tls, length = self._tls, len(data)
        sent = tls.write(data) if length else 0
        if sent < length:
            rest = memoryview(data)
            while sent < length:
                sent += tls.write(rest[sent:])

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def _end_sending(self) -> None:
        with contextlib.suppress(OSError):  # The client has reset the connection, so `connection_lost` follows.
            self._raw.write_eof()

    def _say_end(self) -> None:
        """Send TLS's close_notify: no more data follows."""
        if self._state != OPEN:
            return
        self._state = ENDED
        with contextlib.suppress(ssl.SSLError):  # The client hasn't ended its side.
            self._tls.unwrap()
        if not self._raw.is_closing():
            self._flush()

    def _end(self, reason: str) -> None:
        """End TLS. An unfinished handshake counts as failed for `reason`."""
        state = self._state
        self._say_end()
        self._state = ENDED
        if state < OPEN:
            self._port.failed(reason)
