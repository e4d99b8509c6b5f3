"""Runs programs in parts, each of which writes its own file of results."""

import argparse
from collections.abc import Callable, Mapping

from bench.stand import stand
from bench.stand.findings import Findings

Parts = Mapping[str, Callable[[Findings, argparse.Namespace], None]]
"""What a program measures, by name on the command line."""


def run(parser: argparse.ArgumentParser, parts: Parts, files: Mapping[str, str] | None = None) -> int:
    """Run the parts that `--only` names. Returns the exit code: 1 if a check failed. `files` names results files that differ from their parts."""
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART", help=", ".join(parts))
    options = parser.parse_args()
    stand.end_in_order()
    conditions = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str)}
    codes = []
    for name in options.only:
        findings = Findings((files or {}).get(name, name), **conditions, pinning=stand.PINNING)
        findings.say(f"{name}; {stand.PINNING}.")
        parts[name](findings, options)
        codes.append(findings.close())
    return max(codes)
