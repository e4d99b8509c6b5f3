"""Bytes of each request, all different, and the right answer to each.

All that requests have in common is put together once; a request then costs one formatting step.
"""

from __future__ import annotations

import msgspec

from headway.load.spec import LoadSpec

_HOLE = "0f8fad5bd9cb469fa165"
"""Placeholder of the request's number in the encoded body; long enough not to be there otherwise."""


class _Answer(msgspec.Struct, gc=False):
    output: str


class Payload:
    """Maker of requests, and checker of their answers.

    Arguments:
        spec: the order.
        nonce: letters and digits put into every input, so that two runs never send the same one.
    """

    def __init__(self, spec: LoadSpec, nonce: str) -> None:
        body = dict(spec.body)
        text = str(body.get(spec.member, ""))
        if spec.member:
            body[spec.member] = f"{nonce}-{_HOLE} {text}"
        before, hole, after = msgspec.json.encode(body).partition(_HOLE.encode())
        length = len(before) + (9 if hole else 0) + len(after)
        self._templates = [
            (_escaped(_head(spec, tier, length) + before) + (b"%09d" if hole else b"") + _escaped(after + spec.data))
            for tier in spec.tiers
        ]
        self._counts = bool(hole)
        start, end = f"{nonce}-", f" {text}"
        self._right = (start.upper(), end.upper()) if spec.expect == "upper" else (start, end)
        self._decode = msgspec.json.Decoder(_Answer).decode

    def request(self, number: int, tier: int) -> bytes:
        """The bytes of request `number`, below 10^9, in stream `tier`."""
        template = self._templates[tier]
        return template % number if self._counts else template % ()

    def is_right(self, number: int, body: bytes) -> bool:
        """Whether `body` is the answer to request `number`."""
        try:
            output = self._decode(body).output
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        start, end = self._right
        return output == f"{start}{number:09d}{end}"


def _head(spec: LoadSpec, tier: str, length: int) -> bytes:
    target = spec.target
    lines = [
        f"POST {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        "User-Agent: headway-bench",
        "Accept: application/json",
        f"Content-Type: application/{'octet-stream' if spec.data else 'json'}",
        f"Content-Length: {length + len(spec.data)}",
    ]
    if spec.data:
        lines.append(f"Inference-Header-Content-Length: {length}")
    key = spec.keys.get(tier) or spec.keys.get("")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if spec.mix and tier not in spec.keys:
        lines.append(f"X-Request-Tier: {tier}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _escaped(piece: bytes) -> bytes:
    return piece.replace(b"%", b"%%")
