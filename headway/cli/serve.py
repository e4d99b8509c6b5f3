"""`headway serve`: everything in one process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.flags import with_settings
from headway.config import Settings


@with_settings()
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="module:attribute, path/file.py:attribute, or the URL of a remote batch API.",
            show_default=False,
        ),
    ],
    settings: Settings,
) -> None:
    """Serve TARGET: HTTP, queue and GPU workers in one process.

    TARGET is a function that takes a list of strings and returns as many, a class that is built once per
    worker and then called, or a remote API that takes a batch. It is loaded and tried before the port opens.

    Every flag is also an environment variable (--max-batch-size: HEADWAY_MAX_BATCH_SIZE) and a key of
    headway.toml (max_batch_size). A flag beats the environment, which beats the file.

    Exit codes: 0 stopped in good order, 3 a bad setting, 4 the target cannot be loaded or breaks the rules.
    """
    import uvloop

    from headway import log, wiring

    _open_missing_streams()
    with (
        log.running(settings.log_level, json=settings.log_json) as writer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        code = runner.run(wiring.serve(settings, target))
    if writer.stuck:
        os._exit(code)
    raise typer.Exit(code)


def _open_missing_streams() -> None:
    """Put /dev/null in the place of standard streams that came closed: a socket would else take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
