"""CPU time of a request that carries numbers, over all processes, compared with Triton's Python backend.

    python bench/cost/tensors.py                               six minutes
    python bench/cost/tensors.py --rounds 1 --seconds 2        a first impression

A function takes a batch as an array, and returns the first and last number of each row. A request has one row: 4 numbers (FP32), an image
(UINT8, 224×224×3, 150 kB), or 600 kB (FP32). Triton serves the same function. Both get the same bytes in the Open Inference Protocol's binary
form over HTTP, with wrk, and by gRPC. A batch leaves when it has as many rows as there are connections, or after 20 ms, so that both fill
theirs. The servers swap their order each round. Bounds apply to the median of the rounds' ratios.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from bench.stand import generators, parts, stand, triton_server
from bench.stand.findings import Findings
from bench.stand.generators import Spent
from bench.stand.stand import Server
from headway.core.tensors import SIZES

WAIT_MS = 20
WARM_UP = 1.0
BODY_LIMIT = 8 << 20
WAYS = HTTP, GRPC = "HTTP", "gRPC"
"""APIs that both servers have: the protocol's binary form over HTTP, and raw contents over gRPC."""
Loads = Mapping[str, Callable[[float], int]]
"""Loads by API: a function of seconds that returns the number of answered requests."""


class Case(NamedTuple):
    """A request's row, Triton's name of the model, requests in flight and per full batch, and the bound on the ratio to Triton's time."""

    model: str
    datatype: str
    row: tuple[int, ...]
    in_hand: int
    most: float


CASES = {
    "4 floats": Case("floats", "FP32", (4,), 64, 1.0),
    "150 kB image": Case("pixels", "UINT8", (224, 224, 3), 16, 0.9),
    "600 kB of floats": Case("floats", "FP32", (150_000,), 16, 0.7),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time of a request that carries numbers, over all processes.")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)d)")
    parser.add_argument("--seconds", type=int, default=4, help="of each load (default %(default)d)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    return parts.run(parser, {"tensors": beside_triton})


def beside_triton(findings: Findings, options: argparse.Namespace) -> None:
    if not triton_server.is_installed():
        findings.say("There is no Triton; make triton installs it.")
        return
    rows: list[dict[str, object]] = []
    for name in options.cases:
        case = CASES[name]
        with _ours(case) as (server, ours), _triton(case) as (triton, theirs):
            sides = (server, ours), (triton, theirs)
            for way in options.ways:
                rounds = _rounds(sides, way, options)
                ratio = statistics.median(ours.whole / theirs.whole for ours, theirs in rounds)
                findings.at_most(f"{name}, {way}: CPU time against Triton", ratio, case.most, "x")
                rows.append({
                    "": name, "way": way, **_times("Headway", [ours for ours, _ in rounds]),
                    **_times("Triton", [theirs for _, theirs in rounds]), "x Triton": ratio, "at most": case.most,
                })  # fmt: skip
    findings.table("CPU time of a request in µs; medians", rows)


def _rounds(
    sides: tuple[tuple[Server, Loads], ...], way: str, options: argparse.Namespace
) -> list[tuple[Spent, Spent]]:
    """Return the CPU time of a request on each side, round by round."""
    for _, loads in sides:
        loads[way](WARM_UP)
    rounds = []
    for number in range(options.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        spent = {side: generators.measure(sides[side][0], sides[side][1][way], options.seconds) for side in order}
        rounds.append((spent[0], spent[1]))
    return rounds


def _times(whose: str, turns: list[Spent]) -> dict[str, object]:
    whole, front = (statistics.median([getattr(spent, name) for spent in turns]) for name in ("whole", "front"))
    return {f"{whose} µs".strip(): whole, f"{whose} front".strip(): front, f"{whose} function".strip(): whole - front}


@contextmanager
def _ours(case: Case) -> Iterator[tuple[Server, Loads]]:
    port = stand.free_port()
    row = ", ".join(map(str, case.row))
    flags = ["--grpc-port", str(port), "--max-batch-size", str(case.in_hand), "--max-body-bytes", str(BODY_LIMIT)]
    flags += ["--policy", "window", "--max-wait-ms", str(WAIT_MS), "--log-level", "warning"]
    with stand.headway(f"{stand.TARGETS}:Ends({case.datatype!r}, {row})", *flags, name="tensors") as server:
        yield server, _ways(case, f"{server.url}/v2/models/default/infer", port, "default")


@contextmanager
def _triton(case: Case) -> Iterator[tuple[Server, Loads]]:
    port = stand.free_port()
    with triton_server.upper(grpc_port=port, delay_ms=WAIT_MS, names=("upper", case.model)) as server:
        yield server, _ways(case, f"{server.url}/v2/models/{case.model}/infer", port, case.model)


def _ways(case: Case, url: str, port: int, model: str) -> Loads:
    size = SIZES[case.datatype] * math.prod(case.row)
    tensor = {"name": "x", "datatype": case.datatype, "shape": [1, *case.row]}
    asked = {**tensor, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [asked], "parameters": {"binary_data_output": True}}).encode()
    field = f"Inference-Header-Content-Length: {len(head)}"
    flags = ("--infer", model, "--tensor", case.datatype, *map(str, case.row))
    return {
        HTTP: lambda time: generators.posts(url, head + bytes(size), time, field, in_hand=case.in_hand),
        GRPC: lambda time: generators.calls(port, time, *flags, in_hand=case.in_hand),
    }


if __name__ == "__main__":
    sys.exit(main())
