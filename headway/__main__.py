"""Entry point of both `headway` and `python -m headway`.

A serving process ignores SIGHUP before it imports other modules. By default, the signal would end the process, and a process
manager may send it right after the start. The garbage collector is off during imports. Imported objects stay alive anyway, and
scanning them repeatedly takes a tenth of the start-up time."""

import gc
import signal
import sys
from typing import NoReturn

_ROLES = (
    "serve",
    "gateway",
    "worker",
    "controller",
)  # Commands that serve. Other commands end when their terminal closes.


def main() -> NoReturn:
    """Run the command line, and exit."""
    if sys.argv[1:2] and sys.argv[1] in _ROLES:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        gc.disable()
    if sys.argv[1:2] == ["failover"]:
        signal.signal(signal.SIGINT, _nothing_begun)  # The failover later installs its own, more precise handler.
    from headway import cli

    cli.main()


def _nothing_begun(*_: object) -> NoReturn:
    raise SystemExit("headway: interrupted by SIGINT; nothing was started")


if __name__ == "__main__":
    main()
