"""Programs in parts, each of which can be run by itself and leaves a file of results of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from bench.stand import stand
from bench.stand.findings import Findings

Parts = Mapping[str, Callable[[Findings, argparse.Namespace], None]]
"""What is measured, by the name that the command line has for it."""


def run(parser: argparse.ArgumentParser, parts: Parts, files: Mapping[str, str] | None = None) -> int:
    """Run the parts that the command line asks for, by `--only`; returns the exit code: 1 when a check was not met.

    Arguments:
        parser: knows the other options of the program; they are kept with the findings.
        parts: all of them, in order.
        files: names of the files of results, where they are not those of the parts.
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
