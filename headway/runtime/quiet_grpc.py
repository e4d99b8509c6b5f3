"""Import of gRPC without the log of its C library, which would bypass ours. Backends and telemetry both need it."""

from __future__ import annotations

import os

VERBOSITY = "GRPC_VERBOSITY"
"""Environment variable that the library reads on import. If the user sets it, that counts."""


def import_quietly() -> None:
    """Import gRPC, and leave the environment as it was: a target may have a gRPC of its own.

    Raises:
        ImportError: its package is missing.
    """
    if VERBOSITY in os.environ:
        return
    os.environ[VERBOSITY] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[VERBOSITY]
