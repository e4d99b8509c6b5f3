"""`gates.Gated` with a journal, from which a test can tell how often, where and when each input ran.

The journal is the file `journal` in the working directory. It gets a JSON array as a line when a batch begins and when
its outputs are ready. Lines from several processes don't get mixed up, because each is written in one call.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.targets.gates import Gated

JOURNAL = "journal"


class Journaled(Gated):
    """Records its batches, and answers like `Gated`. Each batch takes `seconds` longer."""

    seconds = 0.0

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._journal = os.open(Path(JOURNAL), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, inputs: list[str]) -> Any:
        number = next(self._numbers)
        self._note(number, inputs)
        time.sleep(self.seconds)
        outputs = super().__call__(inputs)
        self._note(number, None)
        return outputs

    def _note(self, number: int, inputs: list[str] | None) -> None:
        line = json.dumps([os.getpid(), number, time.monotonic(), inputs])
        os.write(self._journal, line.encode() + b"\n")


class Slow(Journaled):
    """Takes as long for a batch as a GPU might."""

    seconds = 0.06
