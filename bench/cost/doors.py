"""CPU time of the gateway's process for each request, door by door, in one run.

    python bench/cost/doors.py                            two minutes
    python bench/cost/doors.py --rounds 1 --seconds 3     a first impression

One server answers a text in capitals, at once, in one worker process. Each round loads the native route and the Open
Inference Protocol, in JSON and binary, with wrk, and the gRPC port with grpc.aio, all in a closed loop with 64 requests in hand,
and then a bare grpc.aio server that does nothing but answer. The time is that of the gateway's process, user and system; the
ratio is of means over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.stand import generators, stand
from bench.stand.findings import Findings
from bench.stand.stand import Broken, Server

NATIVE = "native, HTTP"
TENSOR = "Open Inference Protocol, JSON"
BINARY = "Open Inference Protocol, binary"
GRPC = "headway.v1, gRPC"
BARE = "bare grpc.aio"
CONNECTIONS, IN_HAND = 4, 64
TEXT = "the quick brown fox " * 5
BODY = json.dumps({"model_id": "default", "input_data": TEXT}).encode()
INPUT = {"name": "INPUT", "datatype": "BYTES", "shape": [1]}
TENSOR_BODY = json.dumps({"inputs": [{**INPUT, "data": [TEXT]}]}).encode()
BINARY_SIZE = {"parameters": {"binary_data_size": 4 + len(TEXT)}}
BINARY_HEAD = json.dumps({"inputs": [{**INPUT, **BINARY_SIZE}], "parameters": {"binary_data_output": True}}).encode()
BINARY_BODY = BINARY_HEAD + len(TEXT).to_bytes(4, "little") + TEXT.encode()
BINARY_FIELD = f"Inference-Header-Content-Length: {len(BINARY_HEAD)}"
WARM_UP = 1.0
MOST = 1.25
"""Most of a bare server's time that the gRPC port may take, beside the native route's."""
MOST_TENSOR = 1.5
"""Most of the native route's time that a request with a tensor may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time for each request, door by door.")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)d")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load (default %(default)g)")
    options = parser.parse_args()
    if not generators.has_wrk():
        print("wrk is not installed. On Debian and Ubuntu: apt-get install wrk", file=sys.stderr)
        return 2
    stand.end_in_order()
    findings = Findings(
        "doors", rounds=options.rounds, seconds=options.seconds, connections=CONNECTIONS, in_hand=IN_HAND,
        pinning=stand.PINNING,
    )  # fmt: skip
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, microseconds in _round(options.seconds):
            times[name].append(microseconds)
    rows: list[dict[str, object]] = [
        {"door": name, "µs/request": statistics.fmean(found), "least": min(found), "most": max(found)}
        for name, found in times.items()
    ]
    findings.table("CPU time of the gateway's process", rows)
    native, grpc, bare = (statistics.fmean(times[name]) for name in (NATIVE, GRPC, BARE))
    findings.at_most(
        f"the gRPC port, beside {MOST:g} x the bare server and the native route", grpc, MOST * bare + native, "µs"
    )
    for name in (TENSOR, BINARY):
        findings.at_most(
            f"{name}, beside {MOST_TENSOR:g} x the native route",
            statistics.fmean(times[name]),
            MOST_TENSOR * native,
            "µs",
        )
    return findings.close()


def _round(seconds: float) -> Iterator[tuple[str, float]]:
    """Doors, each with its microseconds for each request."""
    port = stand.free_port()
    flags = ("--grpc-port", str(port), "--max-batch-size", "64", "--log-level", "warning")
    with stand.headway("bench/stand/targets.py:upper", *flags, name="doors") as server:
        url = f"{server.url}/v1/predict"
        yield NATIVE, _measure(server, lambda time: generators.closed_loop(url, BODY, time, IN_HAND).requests, seconds)
        tensor = f"{server.url}/v2/models/default/infer"
        yield TENSOR, _measure(server, lambda time: _posts(tensor, TENSOR_BODY, time), seconds)
        yield BINARY, _measure(server, lambda time: _posts(tensor, BINARY_BODY, time, BINARY_FIELD), seconds)
        yield GRPC, _measure(server, lambda time: _calls(port, time), seconds)
    with _bare_server() as (server, port):
        yield BARE, _measure(server, lambda time: _calls(port, time), seconds)


def _measure(server: Server, load: Callable[[float], int], seconds: float) -> float:
    load(WARM_UP)
    before = server.usage()
    answered = load(seconds)
    return generators.spent(before, server.usage()).get("front", 0.0) / max(1, answered) * 1e6


def _posts(url: str, body: bytes, seconds: float, *fields: str) -> int:
    """Answered posts of a closed loop."""
    found = generators.closed_loop(url, body, seconds, IN_HAND, fields)
    if found.errors:
        raise Broken(f"{found.errors} of {found.requests} posts failed")
    return found.requests


def _calls(port: int, seconds: float) -> int:
    """Answered calls of a closed loop."""
    command = [sys.executable, "bench/stand/grpc_client.py", f"127.0.0.1:{port}", "--seconds", f"{seconds:g}"]
    command += ["--connections", str(CONNECTIONS), "--calls", str(IN_HAND)]
    done = subprocess.run(
        stand.on_load_core(command), cwd=stand.ROOT, capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if done.returncode:
        raise Broken(f"the calls ended with {done.returncode}: {done.stderr[-2000:]}")
    said = json.loads(done.stdout)
    if said["failed"]:
        raise Broken(f"{said['failed']} calls failed")
    return int(said["answered"])


@contextmanager
def _bare_server() -> Iterator[tuple[Server, int]]:
    port = stand.free_port()
    with Server(
        "doors-bare", [sys.executable, "bench/stand/grpc_bare.py", str(port)], lambda process: "front"
    ) as server:
        server.wait_for(lambda: "up" in server.output)
        yield server, port


if __name__ == "__main__":
    sys.exit(main())
