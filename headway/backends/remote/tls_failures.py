"""Explanations of what fails in TLS towards a remote API, and how to mend it. Such an API has run nothing.

A server may say that it refuses a certificate only after the client's handshake is done, when a request has left: in TLS 1.3
always. nginx says it in an answer of its own, and gRPC not at all: it says that it could not read something, or that the
connection was closed.
"""

from __future__ import annotations

import re
import ssl

SHOWN = "the TLS handshake failed"
"""The part of an explanation that clients read."""

_NO_CERTIFICATE = "it asks for a certificate. Name one with remote_cert"
_ANOTHER_CERTIFICATE = "Show one of an authority that it knows, which has not ended"
"""Mend of a certificate that the API refuses."""
_NO_TLS = "it does not speak TLS on this port. Write {scheme}:// in its URL, or name the port that does"

_TITLES = {
    b"No required SSL certificate was sent": _NO_CERTIFICATE,
    b"The SSL certificate error": f"it refuses the certificate of remote_cert. {_ANOTHER_CERTIFICATE}",
    b"The plain HTTP request was sent to HTTPS port": "it speaks TLS. Write https:// in its URL",
}
"""Titles of nginx's answers with 400, each with what it means."""

_TITLE = re.compile(rb"<title>400 ([^<]*)</title>")
_WHOLE = 1000
"""Most bytes of such an answer."""

_OF_CERTIFICATE = re.compile("ALERT_(BAD_CERTIFICATE|UNKNOWN_CA|UNSUPPORTED_CERTIFICATE|CERTIFICATE_|ACCESS_DENIED)")
"""Reasons of OpenSSL where the other side refuses the certificate that it was shown."""
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ,()'-]+))?")
"""Words of gRPC for a certificate that does not do."""
_OTHER_NAME = re.compile("(host ?name|address) mismatch", re.IGNORECASE)
_NOT_NOW = re.compile("certificate (has expired|is not yet valid)")
_CLOSED = re.compile("TSI_DATA_CORRUPTED|Socket closed|Connection reset|ALERT_|recv_?msg|EOF", re.IGNORECASE)
"""Words of gRPC for a connection that the API ended while it was made."""


def explain(error: ssl.SSLError) -> str:
    """Explain to operators what has failed in TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error.verify_message.rstrip("."))
    reason = getattr(error, "reason", None) or str(error)
    if "CERTIFICATE_REQUIRED" in reason:
        return _NO_CERTIFICATE
    if _OF_CERTIFICATE.search(reason):
        said = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
        return f"it refuses the certificate of remote_cert, or the lack of one: {said}. {_ANOTHER_CERTIFICATE}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return _NO_TLS.format(scheme="http")
    said = reason.lower().replace("_", " ")
    return f"the TLS handshake failed: {said}. See that both sides have a version and a cipher in common"


def explain_words(said: str) -> str:
    """Explain to operators why gRPC got no connection, out of the few words that it has for it; empty where TLS is not why."""
    if found := _UNTRUSTED.search(said):
        return _distrust(found[1] or "it cannot be verified")
    if "Hostname Verification Check failed" in said:
        return _another_host("gRPC does not tell of which")
    if "WRONG_VERSION_NUMBER" in said or "HTTP_REQUEST" in said:
        return _NO_TLS.format(scheme="grpc")
    if "CERTIFICATE_REQUIRED" in said:
        return _NO_CERTIFICATE
    if _CLOSED.search(said):
        return (
            "it ended the handshake, and gRPC does not tell why. It may ask for a certificate, which remote_cert names, or "
            f"refuse the one of remote_cert. {_ANOTHER_CERTIFICATE}"
        )
    return ""


def explain_answer(status: int, body: bytes | bytearray) -> str:
    """Explain what has failed in TLS where a proxy says it with an answer; else empty."""
    found = _TITLE.search(body) if status == 400 and len(body) <= _WHOLE else None
    return _TITLES.get(found[1], "") if found else ""


def _another_host(why: str) -> str:
    return f"its certificate is of another host: {why}. Write a name in the URL that its certificate has"


def _distrust(why: str) -> str:
    """Explain why the API's certificate does not do, by OpenSSL's words."""
    if _OTHER_NAME.search(why):
        return _another_host(why)
    if _NOT_NOW.search(why):
        return f"its certificate is not valid now: {why}. Have it renewed there, and look at this machine's clock"
    return f"its certificate is not trusted: {why}. Name the authority that issued it with remote_ca"
