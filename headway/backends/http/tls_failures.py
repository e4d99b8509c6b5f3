"""Explanations of what fails in TLS towards a remote API, and how to mend it. Such an API has run nothing.

A server may say that it refuses a certificate only after the client's handshake is done, when a request has left: in TLS 1.3
always. nginx says it in an answer of its own.
"""

from __future__ import annotations

import re
import ssl

import aiohttp

SHOWN = "the TLS handshake failed"
"""The part of an explanation that clients read."""

_TITLES = {
    b"No required SSL certificate was sent": "it asks for a certificate. Name one with remote_cert",
    b"The SSL certificate error": "it refuses the certificate of remote_cert. Show one of an authority that it knows, which has not ended",
    b"The plain HTTP request was sent to HTTPS port": "it speaks TLS. Write https:// in its URL",
}
"""Titles of nginx's answers with 400, each with what it means."""

_TITLE = re.compile(rb"<title>400 ([^<]*)</title>")
_WHOLE = 1000
"""Most bytes of such an answer."""

_OF_CERTIFICATE = re.compile("ALERT_(BAD_CERTIFICATE|UNKNOWN_CA|UNSUPPORTED_CERTIFICATE|CERTIFICATE_|ACCESS_DENIED)")
"""Reasons of OpenSSL where the other side refuses the certificate that it was shown."""

_ANOTHER_HOST = frozenset([62, 63, 64])
_NOT_NOW = frozenset([9, 10])
"""Codes of OpenSSL for a certificate of another host, and for one that is not valid at this time."""


def explain(exc: BaseException) -> str:
    """Explain to operators what has failed in TLS; empty where that is not what this error comes from."""
    error = _cause(exc)
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error.verify_code, error.verify_message.rstrip("."))
    if error is None:
        return ""
    reason = getattr(error, "reason", None) or str(error)
    if "CERTIFICATE_REQUIRED" in reason:
        return "it asks for a certificate. Name one with remote_cert"
    if _OF_CERTIFICATE.search(reason):
        said = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
        mend = "Show one of an authority that it knows, which has not ended"
        return f"it refuses the certificate of remote_cert, or the lack of one: {said}. {mend}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return "it does not speak TLS on this port. Write http:// in its URL, or name the port that does"
    said = reason.lower().replace("_", " ")
    return f"the TLS handshake failed: {said}. See that both sides have a version and a cipher in common"


def explain_answer(status: int, body: bytes | bytearray) -> str:
    """Explain what has failed in TLS where a proxy says it with an answer; else empty."""
    found = _TITLE.search(body) if status == 400 and len(body) <= _WHOLE else None
    return _TITLES.get(found[1], "") if found else ""


def _distrust(code: int, why: str) -> str:
    if code in _ANOTHER_HOST:
        return f"its certificate is of another host: {why}. Write a name in the URL that its certificate has"
    if code in _NOT_NOW:
        return f"its certificate is not valid now: {why}. Have it renewed there, and look at this machine's clock"
    return f"its certificate is not trusted: {why}. Name the authority that issued it with remote_ca"


def _cause(exc: BaseException | None) -> ssl.SSLError | None:
    """The error of `ssl` behind one of aiohttp's, which may be of the same class and know nothing."""
    while exc is not None and (isinstance(exc, aiohttp.ClientError) or not isinstance(exc, ssl.SSLError)):
        exc = exc.__cause__ or exc.__context__
    return exc
