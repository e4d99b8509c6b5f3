"""Headway with short lives: it forgets queues and workers within seconds in place of minutes or an hour.

`python -m bench.stand.hurried gateway …` is `headway gateway …` so. A program that imports this module forgets as fast. All processes over
one Redis must, or their functions there differ.
"""

from headway.brokers.redis import function_library
from headway.core import departure_board

LIVES = {
    "LIFE_SECONDS": 12,
    "FIGURES_SECONDS": 10,
    "RENEW_SECONDS": 1,
    "STREAM_SECONDS": 6,
    "SWEEP_SECONDS": 1.0,
    "GATEWAY_SECONDS": 6.0,
    "WORKER_SECONDS": 2.0,
}
"""Seconds in place of those of `function_library`."""

function_library._NUMBERS.update(LIVES)
departure_board.HISTORY_SECONDS = 8
function_library._BODY = function_library._body()
function_library.VERSION = f"{function_library.LAYOUT}_hurried"

# Only then, as they take the numbers and the name as they are when they are imported.
from headway import cli  # noqa: E402
from headway.brokers.redis import shard_router  # noqa: E402
from headway.fleet import models  # noqa: E402

shard_router.LIST_QUEUES_EVERY, shard_router.FORGET_AFTER, models.MISSED_FOR = 1.0, 3.0, 3.0

if __name__ == "__main__":
    cli.main()
