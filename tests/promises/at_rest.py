"""Redis after all requests are answered: which kinds of keys may remain, how much they may hold, and for how long.

A key belongs to the fleet, to limits and kept outcomes, to a task id, or to a queue. `1_state.lua`, `5_seats.lua`,
`8_outputs.lua`, `11_limits.lua`, `16_members.lua`, `18_kept.lua`, `18_task_ids.lua` and `19_board.lua` explain the
kinds. Unknown kinds and keys without a time to live are violations.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.promises.evidence import Key
from tests.promises.operation import History, Violation

LIFE, MINUTES, KEPT, LETTERS = 3600.0, 120.0, 90_000.0, 7 * 86_400.0
"""Times to live of kinds of keys that are not renewed, in seconds: state, what is read soon, accounts, dead letters."""
OUTPUTS = 240.0
"""Seconds for which a separate output that nothing keeps remains, and the list of those yet to read it."""
GRACE = 5.0
"""Tolerance for a time to live in seconds: it is rounded, or belongs to a request in progress."""
NAME = re.compile(r"[^:]+:\{(?P<tag>[^}]+)\}(?P<queue>[^:]*):(?P<kind>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of key: a pattern for its names, its longest time to live in seconds, and its maximum size or -1. Entries
    whose outcome a vanished gateway never fetched don't count."""

    names: str
    ttl: float
    most: int = -1


FLEET = (
    Kind(r"w|k|j|capacity|drain|born|recorder|watched|load:.*:j", LIFE),
    Kind(r"known", LETTERS),
    Kind(r"board|notice_size", 180.0),
    Kind(r"departed|silent", 600.0),
    Kind(r"row:.*", LIFE / 2),
)
LIMITS = (Kind(r"w", LIFE + 3600.0), Kind(r"kb|kn|kd|ko:.*", KEPT), Kind(r"bq", LIFE))
OUTPUT, KEPT_OUTPUT = r"R:.*", Kind(r"R:.*", KEPT + OUTPUTS)
"""Names of separate outputs, and the kind of one that kept keys refer to. It remains as long as they do."""
QUEUE = (
    Kind(r"q", 3000.0),
    Kind(r"[lat]\d|tw|d|x|y|ys|s|p|b", LIFE, 0),
    Kind(r"v|v:.*|vs|vd", LIFE, 0),
    Kind(r"u|ua|ut", LIFE, 0),
    Kind(r"e", LIFE, 0),
    Kind(r"rb|ca|hf|hp|hc|hn|h|i|f|c|n|g|m", LIFE),
    Kind(r"b:.*", 60.0, 2),
    Kind(r"r:.*", MINUTES),
    Kind(r"kc:.*", 180.0),
    Kind(r"k:.*", KEPT),
    Kind(r"P:.*", MINUTES),
    Kind(OUTPUT, OUTPUTS),
    Kind(r"Q:.*", OUTPUTS),
    Kind(r"K:.*", KEPT + OUTPUTS),
    Kind(r"z|zl|o|on|o:.*|zp:.*|oc|ou|ql", LETTERS),
    Kind(r"qs", LETTERS),
)
IDS = (Kind(r"o", KEPT),)
SCOPES = {"fleet": FLEET, "limits": LIMITS}
"""Kinds by the hash tag of a key. A queue's tag has the model and the shard."""
OF_ID = re.compile(r"id:[0-9a-f]{32}")
"""Hash tags of task ids chosen by clients."""


def at_rest(history: History) -> Iterator[Violation]:
    """Check what is left in Redis, if that was recorded."""
    keys = history.evidence.keys or ()
    keeping = {key.name for key in keys}
    for key in keys:
        kind = kind_of(key)
        if kind is not None and kind.names == OUTPUT and key.name.replace(":R:", ":K:", 1) in keeping:
            kind = KEPT_OUTPUT
        if kind is None:
            yield Violation("a key in Redis of a kind that nobody knows", str(key))
        elif key.ttl < 0.0:
            yield Violation("a key in Redis without an end", str(key))
        elif key.ttl > kind.ttl + GRACE:
            yield Violation("a key in Redis that ends too late", f"{key}: at most {kind.ttl:g} s")
        elif 0 <= kind.most < key.size:
            yield Violation("a key in Redis that should be empty", str(key))


def kind_of(key: Key) -> Kind | None:
    """Return the kind of a key, or None if unknown."""
    found = NAME.fullmatch(key.name)
    kinds: tuple[Kind, ...] = ()
    if found is not None:
        kinds = IDS if OF_ID.fullmatch(found["tag"]) else SCOPES.get(found["tag"], QUEUE)
    return next(
        (kind for kind in kinds if found is not None and re.fullmatch(kind.names, found["kind"], re.DOTALL)), None
    )
