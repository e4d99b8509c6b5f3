"""A request, and its options."""

from __future__ import annotations

import msgspec

from headway.model.identity import Principal
from headway.model.trace import TraceContext
from headway.model.value import Value


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that a client asks for beside its input. One object serves all requests that ask alike.

    Attributes:
        timeout: seconds until the answer is worthless.
        tier: index of the highest tier that the client asks for; its principal may be held to a lower one.
        key: idempotency key; a request under a known key is not run again, but answered as before. Empty for none.
        task: whether the outcome is kept, to be fetched by the request's id.
        fresh: whether the answer to an identical request will not do. Its own output is kept for later ones, unless `unkept`.
        unkept: whether its own output will not do for them, either.
        chosen: whether the client chose the request's id; if a task of this id is kept, the answer is that task's.
        origin: name that stands for the user when culprits are counted; None: the principal's user; empty: the request
            runs even if its input is known to fail.
        whole: digest of the whole request, where this is one of its several inputs and has a key; empty elsewhere. Under
            the key of one input, another whole is a conflict.
        version: version of the model that must answer; empty: any.
        count: inputs that are let in with this one. The first of a request's several inputs has their number, the others 0.
        way: route or method by which it came, as `POST /v1/inference` or `grpc SERVICE/METHOD`; empty where that is not known.
        trace: span of the client's that the request names, where traces are recorded; None for none.
        replays: span of the request that this one replays; None where it replays none, or that was not sampled.
    """

    timeout: float
    tier: int = 0
    key: str = ""
    task: bool = False
    fresh: bool = False
    chosen: bool = False
    origin: str | None = None
    whole: bytes = b""
    count: int = 1
    version: str = ""
    way: str = ""
    trace: TraceContext | None = None
    replays: TraceContext | None = None
    unkept: bool = False


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """Request for the output of one input, as every port hands it to the gateway.

    Attributes:
        principal: principal of the request, whose limits apply.
        id: UUIDv7 text, unique within the tenant while the request is pending.
        options: options of the request.
        model: name of the model; empty: none is named or known yet.
        input: the value for the model.
        parameters: text of a JSON object, or empty.
    """

    principal: Principal
    id: str
    options: RequestOptions
    model: str = ""
    input: Value = ""
    parameters: bytes = b""
