"""Run programs in parts, each of which leaves a file of results of its own."""

import argparse
from collections.abc import Callable, Mapping

from bench.stand import stand
from bench.stand.findings import Findings

Parts = Mapping[str, Callable[[Findings, argparse.Namespace], None]]
"""What a program measures, by the names of the command line."""


def run(parser: argparse.ArgumentParser, parts: Parts, files: Mapping[str, str] | None = None) -> int:
    """Run the parts that `--only` names. Returns the exit code: 1 when a check failed.

    `files` are names of files of results, where they aren't the names of parts.
    """
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
