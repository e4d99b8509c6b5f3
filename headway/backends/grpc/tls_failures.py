"""Explanations of what fails in TLS towards a remote API over gRPC, out of the few words that gRPC has for it.

An alert by which the API refuses a client's certificate is not told by gRPC: it says that it could not read something, or
that the connection was closed.
"""

from __future__ import annotations

import re

from headway.backends.remote import tls_words

_DISTRUST = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ,()'-]+))?")
_NOT_NOW = re.compile("expired|not yet valid")
_CLOSED = re.compile("TSI_DATA_CORRUPTED|Socket closed|Connection reset|ALERT_|recv_?msg|EOF", re.IGNORECASE)
"""Words for a connection that the API ended while it was made."""


def explain(said: str) -> str:
    """Explain to operators why no connection over TLS came about; empty where TLS has nothing to do with it."""
    if found := _DISTRUST.search(said):
        why = found[1] or "it cannot be verified"
        return tls_words.not_now(why) if _NOT_NOW.search(why) else tls_words.not_trusted(why)
    if "Hostname Verification Check failed" in said:
        return tls_words.another_host("gRPC does not tell of which")
    if "WRONG_VERSION_NUMBER" in said or "HTTP_REQUEST" in said:
        return tls_words.NO_TLS.format(scheme="grpc")
    if "CERTIFICATE_REQUIRED" in said:
        return tls_words.NO_CERTIFICATE
    if _CLOSED.search(said):
        return (
            "it ended the handshake, and gRPC does not tell why. It may ask for a certificate, which remote_cert names, or "
            f"refuse the one of remote_cert. {tls_words.ANOTHER_CERTIFICATE}"
        )
    return ""
