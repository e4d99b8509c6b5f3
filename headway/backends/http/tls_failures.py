"""Explanations of what fails in TLS towards a remote API, and how to mend it. Such an API has run nothing.

A server may say that it refuses a certificate only after the client's handshake is done, when a request has left: in TLS 1.3
always. nginx says it in an answer of its own.
"""

from __future__ import annotations

import re
import ssl

import aiohttp

from headway.backends.remote import tls_words

SHOWN = tls_words.SHOWN

_TITLES = {
    b"No required SSL certificate was sent": tls_words.NO_CERTIFICATE,
    b"The SSL certificate error": f"it refuses the certificate of remote_cert. {tls_words.ANOTHER_CERTIFICATE}",
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
        return tls_words.NO_CERTIFICATE
    if _OF_CERTIFICATE.search(reason):
        said = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
        return f"it refuses the certificate of remote_cert, or the lack of one: {said}. {tls_words.ANOTHER_CERTIFICATE}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return tls_words.NO_TLS.format(scheme="http")
    said = reason.lower().replace("_", " ")
    return f"the TLS handshake failed: {said}. See that both sides have a version and a cipher in common"


def explain_answer(status: int, body: bytes | bytearray) -> str:
    """Explain what has failed in TLS where a proxy says it with an answer; else empty."""
    found = _TITLE.search(body) if status == 400 and len(body) <= _WHOLE else None
    return _TITLES.get(found[1], "") if found else ""


def _distrust(code: int, why: str) -> str:
    if code in _ANOTHER_HOST:
        return tls_words.another_host(why)
    return tls_words.not_now(why) if code in _NOT_NOW else tls_words.not_trusted(why)


def _cause(exc: BaseException | None) -> ssl.SSLError | None:
    """The error of `ssl` behind one of aiohttp's, which may be of the same class and know nothing."""
    while exc is not None and (isinstance(exc, aiohttp.ClientError) or not isinstance(exc, ssl.SSLError)):
        exc = exc.__cause__ or exc.__context__
    return exc
