"""Errors of a service that is not reached: what is wrong, and whether another attempt makes sense. No I/O happens here."""

from __future__ import annotations

import ssl

from headway.client.errors import Unreachable

_NO_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"))
"""Reasons of OpenSSL, which differ by its version, where the other side does not answer in TLS."""

_ASKED = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE")
"""Ends of the reasons where the other side lacks a certificate of the client; the latter is all that TLS 1.2 says."""
_NOT_TAKEN = ("ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN", "ALERT_CERTIFICATE_EXPIRED")


def unreachable(url: str, exc: BaseException) -> Unreachable:
    """Error of a connection that could not be made."""
    return _of_tls(url, exc) or Unreachable(
        f"no connection to {url}: {exc}. Is the service running, and is this its address?"
    )


def lost(url: str, exc: BaseException) -> Unreachable:
    """Error of a connection that broke before the answer."""
    return _of_tls(url, exc) or Unreachable(f"the connection to {url} was lost: {exc}")


def tls_fault(exc: BaseException, authority: str, own: str) -> str:
    """Reason of a handshake that would fail again; empty for anything else.

    Arguments:
        exc: error of a connection.
        authority: where a caller names an authority to trust.
        own: where a caller names a certificate of its own.
    """
    cause: ssl.SSLError | None = None
    step: BaseException | None = exc
    while step is not None:  # The first cause is Python's own; errors made of it may lack its reason.
        cause = step if isinstance(step, ssl.SSLError) else cause
        step = step.__cause__ or step.__context__
    reason = (cause.reason or "") if cause is not None else ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted: {cause.verify_message}. Name the authority that issued it by {authority}."
        )
    if reason in _NO_TLS:
        return f"it does not speak TLS ({reason}). Is it http://?"
    if reason.endswith(_ASKED):
        return f"it asks its clients for a certificate. Name one by {own}."
    if reason.endswith(_NOT_TAKEN):
        return f"it does not take the certificate that it was shown ({reason}). Name another by {own}."
    return ""


def _of_tls(url: str, exc: BaseException) -> Unreachable | None:
    """Error of a handshake that would fail again; None of anything else."""
    why = tls_fault(exc, "ssl_context", "ssl_context")
    if not why:
        return None
    error = Unreachable(f"no connection to {url}: {why}")
    error.hopeless = True
    return error
