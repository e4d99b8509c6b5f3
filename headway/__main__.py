"""`python -m headway` is `headway`, and this is where both begin.

A process of the service ignores SIGHUP before it imports anything else: the signal's own meaning is to end a process, and a manager
may send it right after a start. Nor does it look for garbage before it runs: what is imported stays, and to look it all over again
and again takes a tenth of the start.
"""

import gc
import signal
import sys
from typing import NoReturn

_ROLES = ("serve", "gateway", "worker", "controller")
"""Commands that serve. Any other ends with its terminal."""


def main() -> NoReturn:
    """Run the command line on the arguments of the process, and exit."""
    if sys.argv[1:2] and sys.argv[1] in _ROLES:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        gc.disable()
    if sys.argv[1:2] == ["failover"]:
        signal.signal(signal.SIGINT, _nothing_begun)  # Until the failover, which tells more, has a handler of its own.
    from headway import cli

    cli.main()


def _nothing_begun(*_: object) -> NoReturn:
    raise SystemExit("headway: ended by SIGINT; nothing was begun")


if __name__ == "__main__":
    main()
