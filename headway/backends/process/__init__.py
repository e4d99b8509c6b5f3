"""A GPU worker: a child process that runs the user's function."""

from __future__ import annotations

import sys
from pathlib import Path


def is_child() -> bool:
    """Return True if this process is a worker's child: its main program is `child.py`."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return main is not None and Path(main) == Path(__file__).with_name("child.py")
