"""Import of gRPC without the log of its C library, which is written past ours, and is no JSON where ours is."""

from __future__ import annotations

import os

VERBOSITY = "GRPC_VERBOSITY"
"""Variable that the library reads when it is imported. Set by the user it counts."""


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
