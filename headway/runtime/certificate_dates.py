"""Time for which a certificate is valid, read from its encoding (X.509 in DER, RFC 5280, section 4.1)."""

from __future__ import annotations

from datetime import UTC, datetime

_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18
_CENTURY = 50
"""Year of two digits from which on it is one of the last century."""


def validity(der: bytes) -> tuple[float, float]:
    """First and last instant of a certificate's time, in Unix seconds.

    Raises:
        ValueError: it is no certificate.
    """
    body, _ = _element(_element(der, _SEQUENCE)[0], _SEQUENCE)
    if body[:1] == bytes([_VERSION]):
        _, body = _element(body)
    for _ in ("serial number", "signature algorithm", "issuer"):
        _, body = _element(body)
    times, _ = _element(body, _SEQUENCE)
    first, rest = _instant(times)
    last, _ = _instant(rest)
    return first, last


def _element(data: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """Content of the first element, of a tag if one is given, and what follows it."""
    if len(data) < 2 or (tag is not None and data[0] != tag):
        raise ValueError("not a certificate")
    length, begin = data[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(data[2:begin], "big")
    if length > len(data) - begin:
        raise ValueError("not a certificate")
    return data[begin : begin + length], data[begin + length :]


def _instant(data: bytes) -> tuple[float, bytes]:
    text, rest = _element(data)
    shown = text.decode("ascii")
    if data[0] == _UTC_TIME:
        shown = ("19" if int(shown[:2]) >= _CENTURY else "20") + shown
    elif data[0] != _TIME:
        raise ValueError("not a certificate")
    return datetime.strptime(shown, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp(), rest
