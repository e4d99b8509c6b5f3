"""Reads the journal that the model function `tests/targets/marked.py` writes."""

import json
from pathlib import Path

from tests.promises.operation import Run, canonical


def runs_in(path: Path) -> list[Run]:
    """Return all runs of all processes, in the order of their first journal lines."""
    runs: dict[str, Run] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith("\n"):
            continue
        match json.loads(line):
            case [name, began, inputs, version, model, host, *parameters]:
                values = canonical(json.dumps(parameters[0])) if parameters else ""
                runs[name] = Run(name, inputs, began, version=version, model=model, host=host, parameters=values)
            case [name, ended]:
                runs[name].ended = ended
    return list(runs.values())
