"""Lanes, which hold decisions made once for many alike requests.

Most requests of a connection have the same principal, options and model, and want no more than an answer in time or a kept
outcome. A lane holds everything that can be decided about them in advance, until the facts behind it change. All other
requests go through `Gateway.submit` into the same queue.
"""

from __future__ import annotations

from headway.core.throttle import Throttle
from headway.model import Entry, Principal, RequestOptions

ANY_KEY = "\0"
"""Stands for any idempotency key in the options of a lane."""


class Lane:
    """Lane of alike requests.

    Attributes:
        facts: see `Gateway.facts`. A lane with an older token is closed.
        open: True if the requests may take it. Otherwise they go through `submit`.
        keeps: True if tasks and requests with an idempotency key may take it. Their outcomes are kept for `keep` seconds.
        named: first part of what their digest hashes; see `headway.core.dedup.digest`.
        rows: True if only single rows of tensors may take it; see `ServedModel.takes_unweighed`.
        asker: principal as the caller gave it.
        asked: model that the requests name; None or empty for the default.
        principal: principal with its limits for the model.
        pattern: their entry, except for id, input, parameters and nonce.
        throttle, throttled: throttle of the model's lowest tier, and True if the requests are of that tier.
        usual: True if the requests have the usual timeout.
    """

    __slots__ = (
        "asked", "asker", "facts", "keep", "keeps", "model", "named", "open", "options", "pattern", "principal", "rows", "throttle", "throttled", "usual",
    )  # fmt: skip

    def __init__(self, facts: object, asker: Principal, options: RequestOptions, asked: str | None) -> None:
        self.facts, self.asker, self.options, self.asked = facts, asker, options, asked
        self.open = self.rows = self.keeps = self.throttled = self.usual = False
        self.principal, self.model, self.pattern = asker, "", _NO_ENTRY
        self.keep, self.named = 0.0, b""
        self.throttle = _OPEN_THROTTLE


_OPEN_THROTTLE, _NO_ENTRY = Throttle(), Entry("", "", "", 0, "", "", 0.0, 0.0)
CLOSED = Lane(None, Principal(user="", tenant="", tier=0), RequestOptions(0.0), None)
"""Lane that no request takes."""


def asks_nothing_rare(options: RequestOptions) -> bool:
    """Return True if requests with these options want no more than an answer in time or a kept outcome."""
    wants = options.chosen or options.version or options.whole or (options.key and options.task)
    return not (wants or options.trace or options.replays) and options.count == 1
