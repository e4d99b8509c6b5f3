"""Recorded traffic that simulations replay.

The Azure LLM inference traces of 2023, from the folder `data` of the repository Azure/AzurePublicDataset on GitHub (CC-BY 4.0; Patel et al.,
"Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024). They are not part of this repository.
"""

from pathlib import Path

from bench.stand.findings import Findings
from headway.core.arrivals import instants

TRACES = {"code": "AzureLLMInferenceTrace_code.csv", "conv": "AzureLLMInferenceTrace_conv.csv"}


def traffic(folder: Path | None, findings: Findings) -> dict[str, tuple[float, ...]]:
    """Return instants by name of the traffic, none for Poisson. Says which trace is left out for want of its file."""
    traces: dict[str, tuple[float, ...]] = {"poisson": ()}
    for name, file in TRACES.items():
        path = None if folder is None else folder / file
        if path is not None and path.is_file():
            with path.open(encoding="utf-8", newline="") as lines:
                traces[name] = tuple(instants(lines, str(path), "--traces"))
        else:
            findings.say(f"Left out: {file} is not in {folder or '--traces DIR, which is not given'}.")
    return traces
