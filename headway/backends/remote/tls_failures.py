"""Explains TLS failures at a remote API, with a remedy for each. After such a failure, the API has run nothing.

A server may refuse a certificate late, when the client has finished the handshake and sent a request. In TLS 1.3, it always
does. nginx then answers the request itself. gRPC only reports an unreadable message or a closed connection.
"""

from __future__ import annotations

import re
import ssl

SHOWN = "the TLS handshake failed"  # Explanation for clients.

_NO_CERTIFICATE = "it asks for a certificate. Name one with remote_cert"
_ANOTHER_CERTIFICATE = "Present one that has not expired, from an authority that it knows"  # If the API refuses ours.
_NO_TLS = "it does not speak TLS on this port. Write {scheme}:// in its URL, or name the port that does"

_TITLES = {  # Explanations, by the title of nginx's 400 answers.
    b"No required SSL certificate was sent": _NO_CERTIFICATE,
    b"The SSL certificate error": f"it refuses the certificate of remote_cert. {_ANOTHER_CERTIFICATE}",
    b"The plain HTTP request was sent to HTTPS port": "it speaks TLS. Write https:// in its URL",
}

_TITLE = re.compile(rb"<title>400 ([^<]*)</title>")
_WHOLE = 1000  # Maximum size of such an answer in bytes.

_OF_CERTIFICATE = re.compile("ALERT_(BAD_CERTIFICATE|UNKNOWN_CA|UNSUPPORTED_CERTIFICATE|CERTIFICATE_|ACCESS_DENIED)")
"""OpenSSL's reason if the other side refuses our certificate."""
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([\w ,()'-]+))?")  # gRPC's words for a bad certificate.
_OTHER_NAME = re.compile("(host ?name|address) mismatch", re.IGNORECASE)
_NOT_NOW = re.compile("certificate (has expired|is not yet valid)")
_CLOSED = re.compile("TSI_DATA_CORRUPTED|Socket closed|Connection reset|ALERT_|recv_?msg|EOF", re.IGNORECASE)
"""gRPC's words for a connection that the API ended during the handshake."""


def explain(error: ssl.SSLError) -> str:
    """Explain a TLS failure to operators."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error.verify_message.rstrip("."))
    reason = getattr(error, "reason", None) or str(error)
    if "CERTIFICATE_REQUIRED" in reason:
        return _NO_CERTIFICATE
    if _OF_CERTIFICATE.search(reason):
        words = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
        return f"it refuses the certificate of remote_cert, or the lack of one: {words}. {_ANOTHER_CERTIFICATE}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return _NO_TLS.format(scheme="http")
    words = reason.lower().replace("_", " ")
    return f"the TLS handshake failed: {words}. Make sure that both sides have a version and a cipher in common"


def explain_words(said: str) -> str:
    """Turn gRPC's error message into an explanation for operators of why the connection failed. Returns "" if TLS isn't the cause."""
    if untrusted := _UNTRUSTED.search(said):
        return _distrust(untrusted[1] or "it cannot be verified")
    if "Hostname Verification Check failed" in said:
        return _another_host("gRPC does not say which")
    if "WRONG_VERSION_NUMBER" in said or "HTTP_REQUEST" in said:
        return _NO_TLS.format(scheme="grpc")
    if "CERTIFICATE_REQUIRED" in said:
        return _NO_CERTIFICATE
    if _CLOSED.search(said):
        return (
            "it ended the handshake, and gRPC does not say why. It may ask for a certificate, which remote_cert names, or "
            f"refuse the certificate of remote_cert. {_ANOTHER_CERTIFICATE}"
        )
    return ""


def explain_answer(status: int, body: bytes | bytearray) -> str:
    """Explain a TLS failure that a proxy reports in its answer. Return "" for any other answer."""
    title = _TITLE.search(body) if status == 400 and len(body) <= _WHOLE else None
    return _TITLES.get(title[1], "") if title else ""


def _another_host(why: str) -> str:
    return f"its certificate is for another host: {why}. In the URL, use a name that is in its certificate"


def _distrust(why: str) -> str:
    if _OTHER_NAME.search(why):
        return _another_host(why)
    if _NOT_NOW.search(why):
        return f"its certificate is not valid now: {why}. Have it renewed there, and check this machine's clock"
    return f"its certificate is not trusted: {why}. Name the authority that issued it with remote_ca"
