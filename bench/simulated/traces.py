"""Recorded traffic for simulations, and the command line of programs that draw services at random.

The Azure LLM inference traces of 2023, from the folder `data` of the repository Azure/AzurePublicDataset on GitHub (CC-BY 4.0; Patel et al.,
"Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024). They are not part of this repository.
"""

import argparse
import os
from pathlib import Path

from bench.stand.findings import Findings
from headway.core.arrivals import instants

TRACES = {"code": "AzureLLMInferenceTrace_code.csv", "conv": "AzureLLMInferenceTrace_conv.csv"}


def traffic(folder: Path | None, findings: Findings) -> dict[str, tuple[float, ...]]:
    """Return arrival times by trace name. Reports traces that are skipped because their file is missing."""
    traces: dict[str, tuple[float, ...]] = {}
    for name, file in TRACES.items():
        path = None if folder is None else folder / file
        if path is not None and path.is_file():
            with path.open(encoding="utf-8", newline="") as lines:
                traces[name] = tuple(instants(lines, str(path), "--traces"))
        else:
            findings.say(f"Left out: {file} is not in {folder or '--traces DIR, which is not given'}.")
    return traces


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--configurations", type=int, default=500, metavar="N", help="how many (default %(default)d)")
    made.add_argument("--seed", type=int, default=1, help="of the draw (default %(default)d)")
    made.add_argument("--traces", type=Path, metavar="DIR", help="where the Azure traces lie")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--jobs", type=int, default=cores, help="processes (default: one a core)")
    return made
