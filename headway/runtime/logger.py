"""Loggers, and how structlog and gRPC are imported for them.

If it can, structlog imports Rich, for coloured tracebacks. That would take a fifth of the import time at startup, and our tracebacks
are plain. So structlog is first imported here, with Rich hidden. Later imports of Rich work as usual.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

GRPC_VERBOSITY = "GRPC_VERBOSITY"  # Environment variable that gRPC's C library reads on import.

if TYPE_CHECKING or "rich" in sys.modules:
    import structlog as structlog
else:
    sys.modules["rich"] = None
    try:
        import structlog as structlog
    finally:
        del sys.modules["rich"]


def get_logger(name: str) -> Any:
    """Return the logger for a module. Its log lines consist of an event and fields."""
    return structlog.get_logger(name)


def import_grpc_quietly() -> None:
    """Import gRPC with its C library's log turned off, unless the user has set its level. That log would bypass ours. The
    environment is restored, because a target may use gRPC itself. Raises ImportError if the package is missing."""
    if GRPC_VERBOSITY in os.environ:
        return
    os.environ[GRPC_VERBOSITY] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[GRPC_VERBOSITY]
