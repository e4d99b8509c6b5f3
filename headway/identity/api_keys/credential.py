"""Format of API keys and service tokens.

    hw_live_<id>_<secret><checksum>     a client's key, for the public port
    hw_svc_<id>_<secret><checksum>      a service token, for the admin port

All three parts consist of letters and digits (base 62). The id (12 characters) identifies the key in its store. The secret
(22 characters) has 131 random bits. Stores keep its SHA-256; a slow hash would add nothing, because 131 bits can't be
guessed. The checksum (6 characters) is the CRC-32 of everything before it. It provides no protection, but distinguishes a
typo from a wrong key without a lookup, and lets secret scanners recognise leaked keys."""

from __future__ import annotations

import hashlib
import re
import string
from zlib import crc32

LIVE = b"hw_live_"
SERVICE = b"hw_svc_"
NOISE = 32  # Random bytes for creating a key, enough to make all secrets equally likely.

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PAIRS = [(first + second).encode() for first in _DIGITS for second in _DIGITS]
_ID = 12
_SECRET = 22
_CHECKSUM = 6
_FORM = re.compile(rb"hw_live_([0-9A-Za-z]{12})_([0-9A-Za-z]{22})([0-9A-Za-z]{6})")
_ID_FORM = re.compile(rf"[0-9A-Za-z]{{{_ID}}}")


def generate(prefix: bytes, noise: bytes) -> str:
    """Create a key with the prefix LIVE or SERVICE. `noise` must be at least NOISE unpredictable bytes."""
    if len(noise) < NOISE:
        raise ValueError(f"a key needs {NOISE} random bytes, not {len(noise)}")
    parts = _base62(int.from_bytes(noise), _ID + _SECRET)
    text = f"{prefix.decode()}{parts[:_ID]}_{parts[_ID:]}"
    return text + _checksum(text.encode()).decode()


def parse(text: bytes) -> tuple[str, bytes] | None:
    """Return the id and secret of a client's key. None for anything else, including a key with a typo."""
    key = _FORM.fullmatch(text)
    if key is None or _checksum(text[:-_CHECKSUM]) != key[3]:
        return None
    return key[1].decode(), key[2]


def digest(secret: bytes) -> bytes:
    """Return the digest of a secret, which stores keep."""
    return hashlib.sha256(secret).digest()


def is_id(text: str) -> bool:
    """Return True if a string has the format of a key id."""
    return _ID_FORM.fullmatch(text) is not None


def _checksum(text: bytes) -> bytes:
    """Return a checksum of six digits. Two digits at a time are faster, which matters because every request needs one."""
    high, last = divmod(crc32(text), 3844)
    first, middle = divmod(high, 3844)
    return _PAIRS[first] + _PAIRS[middle] + _PAIRS[last]


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
