"""Connection errors, for clients, the command line and the load generator: what is wrong, and whether to retry. No I/O."""

from __future__ import annotations

import ssl

from headway.client.errors import Unreachable

_NO_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"))
"""OpenSSL's reasons, which depend on its version, if the other side doesn't answer in TLS."""

_ASKED = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE")
"""OpenSSL's reasons, by their ends, if the client must show a certificate; TLS 1.2 says no more than the latter."""
_NOT_TAKEN = ("ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN", "ALERT_CERTIFICATE_EXPIRED")


def unreachable(url: str, exc: BaseException) -> Unreachable:
    """Return the error for a connection that could not be made."""
    return _of_tls(url, exc) or Unreachable(
        f"no connection to {url}: {exc}. Is the service running, and is this its address?"
    )


def lost(url: str, exc: BaseException) -> Unreachable:
    """Return the error for a connection that broke before the answer."""
    return _of_tls(url, exc) or Unreachable(f"the connection to {url} was lost: {exc}")


def tls_fault(exc: BaseException, authority: str, own: str) -> str:
    """Return why a TLS handshake would fail again; empty for any other error.

    `authority` and `own` name the options for an authority to trust and for the caller's own certificate.
    """
    cause: ssl.SSLError | None = None
    step: BaseException | None = exc
    while step is not None:  # The last SSLError is Python's own; libraries may wrap it and lose its reason.
        cause = step if isinstance(step, ssl.SSLError) else cause
        step = step.__cause__ or step.__context__
    reason = (cause.reason or "") if cause is not None else ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}. Name its authority by {authority}."
    if reason in _NO_TLS:
        return f"it does not speak TLS ({reason}). Is it http://?"
    if reason.endswith(_ASKED):
        return f"it asks its clients for a certificate. Name one by {own}."
    if reason.endswith(_NOT_TAKEN):
        return f"it does not take the certificate that it was shown ({reason}). Name another by {own}."
    return ""


def _of_tls(url: str, exc: BaseException) -> Unreachable | None:
    """Return the error for a handshake that would fail again; None for any other error."""
    why = tls_fault(exc, "ssl_context", "ssl_context")
    if not why:
        return None
    error = Unreachable(f"no connection to {url}: {why}")
    error.hopeless = True
    return error
