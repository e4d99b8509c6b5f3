"""Runs a role in this process: streams, log, event loop, exit code. What the commands `serve`, `gateway`, … have in common."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.config import FIELDS, Settings
from headway.model import Role

TargetText = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="module:attribute, path/file.py:attribute, or the URL of a remote batch API.",
        show_default=False,
    ),
]

_CLIENTS = (
    "host",
    "port",
    "keys",
    "jwt",
    "max_queue",
    "queue_timeout_ms",
    "request_timeout_ms",
    "model_version",
    "max_body_bytes",
    "max_header_bytes",
    "max_connections",
    "header_timeout_ms",
    "body_timeout_ms",
    "keep_alive_ms",
    "lame_duck_ms",
    "fallback",
    "fallback_concurrency",
)
_SLOTS = ("workers", "devices", "reload", "recycle_rss_mb", "recycle_after_s", "lease_ms")
_BATCHES = (
    "start_timeout_ms",
    "gpu_timeout_ms",
    "max_wait_ms",
    "policy",
    "reserved_share",
    "remote_format",
    "remote_token",
)
_CONTROL = ("target_utilisation",)


def _but(*unused: str) -> tuple[str, ...]:
    return tuple(name for name in FIELDS if name not in unused)


GATEWAY_SETTINGS = _but(*_SLOTS, *_CONTROL)
"""What a gateway goes by; how batches run is for its fallback."""
WORKER_SETTINGS = _but(*_CLIENTS, *_CONTROL)
"""What a worker goes by."""
CONTROLLER_SETTINGS = _but(*_CLIENTS, *_SLOTS, *_BATCHES)
"""What a controller goes by."""


def run(settings: Settings, role: Role, target: str = "") -> None:
    """Run until a signal comes, and exit."""
    import uvloop

    from headway.app import signals, wiring
    from headway.runtime import log

    signals.ignore_until_ready()
    _open_missing_streams()
    with (
        log.running(settings.log_level, json=settings.log_json) as writer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        code = runner.run(wiring.run(settings, role, target, writer.reopen))
    if writer.write_blocked or not _flushed():
        os._exit(code)
    raise typer.Exit(code)


def _flushed() -> bool:
    """Whether what was printed last is taken. If not, Python's own end would say 120, whatever became of the service."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    return True


def _open_missing_streams() -> None:
    """Put /dev/null in the place of standard streams that came closed: a socket would else take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
