"""Compressed bodies: unpacked at a cost that the largest body bounds, whatever a client sends."""

from __future__ import annotations

import zlib

from headway.config import Settings
from headway.errors import BadRequest
from headway.http.inference.inference_head import too_large

CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Window of each coding, as zlib takes it."""


def unpack_body(body: bytes, coding: str, settings: Settings) -> bytes:
    """Body as it was before it was compressed.

    Arguments:
        body: compressed body.
        coding: one of CODINGS.
        settings: settings of the largest body, which counts unpacked, too.

    Raises:
        RequestError: the body is not compressed so, or more than the largest body comes out of it.
    """
    unpacker = zlib.decompressobj(CODINGS[coding])
    try:
        unpacked = unpacker.decompress(body, settings.max_body_bytes + 1)
    except zlib.error as exc:
        raise BadRequest(f"the body is not {coding}, as Content-Encoding says: {exc}") from None
    if len(unpacked) > settings.max_body_bytes:
        raise too_large(settings)
    if not unpacker.eof:
        raise BadRequest(f"the {coding} body is cut off after {len(body)} bytes; send all of it")
    if unpacker.unused_data:
        raise BadRequest(
            f"{len(unpacker.unused_data)} bytes follow the end of the {coding} body; send one {coding} stream"
        )
    return unpacked
