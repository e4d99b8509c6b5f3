"""Lanes: requests that ask for nothing rare, with all that is decided about them before they come.

Most requests of a connection ask alike: the same principal, options and model, and nothing beyond an answer in time, or an outcome
that is kept. Whether that is so is decided once, and again when what it depends on has changed. All others go by `submit`, into
the same queue.
"""

from __future__ import annotations

from headway.core.throttle import Throttle
from headway.model import Entry, Principal, RequestOptions

ANY_KEY = "\0"
"""Idempotency key in the options of a lane for requests that have one."""


class Lane:
    """Lane of requests that ask alike.

    Attributes:
        facts: facts that it was decided by, as one object; it is closed as soon as the gateway goes by others.
        open: whether such requests may take it; if not, they go by `submit`.
        keeps: whether those may that are tasks, or have an idempotency key, and ask for nothing else that is rare.
        keep: seconds for which outcomes of these are kept.
        named: beginning of what is hashed of these; see `headway.core.dedup.digest`.
        rows: whether those may with one row of tensors, though others have to be weighed; see `ServedModel.takes_unweighed`.
        asker: principal that was asked for.
        options: options that it is for.
        asked: model that the requests name; None or empty for the default.
        principal: principal of the requests, with the limits that it has for the model.
        model: name of the model.
        pattern: entry of which those of all of them are copies, but for id, input, parameters and nonce.
        throttle: throttle of the model's lowest tier.
        throttled: whether they are of that tier.
        usual: whether their time in all is the usual one.
    """

    __slots__ = (
        "asked", "asker", "facts", "keep", "keeps", "model", "named", "open", "options", "pattern", "principal", "rows", "throttle", "throttled", "usual",
    )  # fmt: skip

    def __init__(self, facts: object, asker: Principal, options: RequestOptions, asked: str | None) -> None:
        self.facts, self.asker, self.options, self.asked = facts, asker, options, asked
        self.open = self.rows = self.keeps = self.throttled = self.usual = False
        self.principal, self.model, self.pattern = asker, "", _NOTHING
        self.keep, self.named = 0.0, b""
        self.throttle = _NONE


_NONE, _NOTHING = Throttle(), Entry("", "", "", 0, "", "", 0.0, 0.0)
CLOSED = Lane(None, Principal(user="", tenant="", tier=0), RequestOptions(0.0), None)
"""Lane that nothing takes."""


def asks_nothing_rare(options: RequestOptions) -> bool:
    """Whether options are such that a request with them needs no more than an answer in time, and perhaps has to be kept."""
    wants = options.chosen or options.version or options.whole or (options.key and options.task)
    return not (wants or options.trace or options.replays) and options.count == 1
