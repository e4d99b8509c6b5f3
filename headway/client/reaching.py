"""Errors of a service that is not reached: what is wrong, and whether another attempt makes sense. No I/O happens here."""

from __future__ import annotations

import ssl

from headway.client.errors import Unreachable

_NO_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"))
"""Reasons of OpenSSL, which differ by its version, where the other side does not answer in TLS."""


def unreachable(url: str, exc: BaseException) -> Unreachable:
    """Error of a connection that could not be made."""
    return _of_tls(url, exc) or Unreachable(
        f"no connection to {url}: {exc}. Is the service running, and is this its address?"
    )


def lost(url: str, exc: BaseException) -> Unreachable:
    """Error of a connection that broke before the answer."""
    return _of_tls(url, exc) or Unreachable(f"the connection to {url} was lost: {exc}")


def _of_tls(url: str, exc: BaseException) -> Unreachable | None:
    """Error of a handshake that would fail again; None of anything else."""
    cause: ssl.SSLError | None = None
    step: BaseException | None = exc
    while step is not None:  # The first cause is Python's own; errors made of it may lack its reason.
        cause = step if isinstance(step, ssl.SSLError) else cause
        step = step.__cause__ or step.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = (
            f"its certificate is not trusted: {cause.verify_message}. Name the authority that issued it by ssl_context."
        )
    elif cause is not None and cause.reason in _NO_TLS:
        why = f"it does not speak TLS ({cause.reason}). Is it http://?"
    else:
        return None
    error = Unreachable(f"no connection to {url}: {why}")
    error.hopeless = True
    return error
