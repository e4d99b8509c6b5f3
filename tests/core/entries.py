from headway.model import Entry


class WatchedText(str):
    """A string that weak references can point to."""


def entry(
    id: str = "1",
    *,
    model: str = "m",
    input: str | None = None,
    tier: int = 0,
    tenant: str = "t",
    gateway: str = "g",
    queue_timeout: float = 2.0,
    timeout: float = 4.0,
    weight: int = 1,
    shape: int = 0,
    count: int = 1,
    caller: str = "",
    parameters: bytes = b"",
) -> Entry:
    """Return an entry. Its input defaults to its id."""
    text = id if input is None else input
    return Entry(
        id, model, text, tier, tenant, gateway, queue_timeout, timeout, parameters, caller=caller, weight=weight,
        shape=shape, count=count,
    )  # fmt: skip
