"""Operations as HTTP requests, and the header fields that gRPC sends as metadata. Pure."""

import json

from tests.promises.numbers_in import CODES_IN, NUMBERS_IN
from tests.promises.operation import ASKS, Kind, Operation
from tests.promises.ways_in import WAYS_IN

WAYS = {way.name: way for way in (*WAYS_IN, *NUMBERS_IN, *CODES_IN)}
"""APIs by name."""


def request_of(operation: Operation, credential: str, wait: float) -> bytes:
    """Write an operation as a request, which may wait `wait` seconds. `credential` is the `Authorization` value."""
    fields = fields_of(operation, credential)
    if operation.kind in (Kind.POLL, Kind.FORGET):
        method = "GET" if operation.kind is Kind.POLL else "DELETE"
        query = f"?wait={wait:.2f}" if wait else ""
        line, body = f"{method} /v1/result/req_{operation.id}{query} HTTP/1.1", b""
    else:
        way = WAYS[operation.way]
        path, own, body = way.write(operation.words, operation.wanted, operation.model)
        if operation.parameters:
            body = way.with_parameters(body, json.loads(operation.parameters))
        line = f"POST {path} HTTP/1.1"
        fields += own
        fields.append(f"Content-Length: {len(body)}")
        if operation.kind is Kind.TASK:
            fields.append(f"Prefer: respond-async, wait={wait:.0f}" if wait else "Prefer: respond-async")
    return "\r\n".join([line, "Host: promises", *fields, "", ""]).encode() + body


def fields_of(operation: Operation, credential: str) -> list[str]:
    """Return an operation's header fields, for any API."""
    fields = [f"Authorization: {credential}"] if credential else []
    if operation.kind in ASKS:
        fields += [f"X-Request-Id: req_{operation.id}"] if operation.chosen else []
        fields += [f"Idempotency-Key: {operation.key}"] if operation.key else []
        fields += ["Cache-Control: no-cache"] if operation.fresh else []
        by_deadline = WAYS[operation.way].wire != "http" and operation.number % 2
        if operation.timeout < 1.0 and not by_deadline:
            fields.append(f"X-Request-Timeout-Ms: {operation.timeout * 1000:.0f}")
    return fields
