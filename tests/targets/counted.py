"""A target that appends its inputs to the file `runs` in the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.targets.gates import Gated

RUNS = "runs"


class Counted(Gated):
    def __call__(self, inputs: list[str]) -> Any:
        with Path(RUNS).open("a") as runs:
            runs.writelines(f"{text}\n" for text in inputs)
        return super().__call__(inputs)


def runs_in(folder: Path) -> list[str]:
    """Return the inputs that a service in `folder` has run, except its warm-up."""
    from headway.model import WARM_UP

    return [text for text in (folder / RUNS).read_text().splitlines() if text != WARM_UP]
