"""How a request is to be served."""

from __future__ import annotations

import msgspec


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """What a client asks for beside its input; one object serves all requests that ask alike.

    Attributes:
        timeout: seconds until the answer is worthless.
        tier: index of the highest tier that the client asks for; its principal may be held to a lower one.
        key: idempotency key: what was asked under it before is not run again, but answered as it was; empty for none.
        task: the outcome is kept, to be asked for by the request's id.
        fresh: the answer to an identical request will not do.
        chosen: the client chose the request's id; if a task of this id is kept, the answer is that task's.
        origin: stands for the user when culprits are looked for; None: the principal's user does; empty: the request runs
            even if its input is known to fail.
    """

    timeout: float
    tier: int = 0
    key: str = ""
    task: bool = False
    fresh: bool = False
    chosen: bool = False
    origin: str | None = None
