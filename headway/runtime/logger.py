"""Loggers, and imports of structlog and gRPC that suit them.

Structlog imports Rich if it can, for coloured tracebacks. Ours are plain, and Rich would take a fifth of the import time at a
start. So structlog is imported here first, with Rich hidden. Later imports of Rich work as usual.
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
    """Return the logger of a module. Its lines have an event and fields."""
    return structlog.get_logger(name)


def import_grpc_quietly() -> None:
    """Import gRPC without the log of its C library, which would bypass ours, unless the user has set that log's level. The
    environment stays as it was, because a target may use gRPC itself. Raises ImportError if the package is missing."""
    if GRPC_VERBOSITY in os.environ:
        return
    os.environ[GRPC_VERBOSITY] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[GRPC_VERBOSITY]
