"""Loggers, by structlog without Rich.

Structlog takes Rich for coloured tracebacks where it finds it. The log's are plain, and Rich would be a fifth of the time that the imports of a
start take. So structlog is first imported here, while Rich is out of sight; whoever imports Rich later gets it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "rich" in sys.modules:
    import structlog as structlog
else:
    sys.modules["rich"] = None
    try:
        import structlog as structlog
    finally:
        del sys.modules["rich"]


def get_logger(name: str) -> Any:
    """Return the logger of the module `name`, whose lines have an event and fields."""
    return structlog.get_logger(name)
