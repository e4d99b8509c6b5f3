"""CPU time of a request, door by door, in one run.

    python bench/cost/doors.py                               three minutes
    python bench/cost/doors.py --rounds 3 --seconds 1        a first impression

One server puts a text in capitals, at once. Beside it stand a bare grpc.aio server and, after `make triton`, Triton with the same function. Each
round loads every door in a closed loop with 64 requests in hand, HTTP by wrk, gRPC by grpc.aio. A batch leaves with 64 inputs or after 20 ms,
Triton's too, so all doors fill their batches however fast their clients are. The time is that of the process that holds the connections, and of
all processes beside it. Ratios are within a round, bounds are on the medians, and every other round goes backwards.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.stand import generators, stand, triton_server
from bench.stand.findings import Findings
from bench.stand.stand import Broken, Server

NATIVE = "native, HTTP"
COMPLETIONS = "OpenAI completions"
TENSOR = "Open Inference Protocol, JSON"
BINARY = "Open Inference Protocol, binary"
GRPC = "headway.v1, gRPC"
INFER = "Open Inference Protocol, gRPC"
BARE = "bare grpc.aio"
TRITON = "Triton, Open Inference Protocol, gRPC"
WAIT_MS = 20
IN_HAND = 64
TEXT = "the quick brown fox " * 5
BODY = json.dumps({"model_id": "default", "input_data": TEXT}).encode()
PROMPT = json.dumps({"model": "default", "prompt": TEXT}).encode()
INPUT = {"name": "INPUT", "datatype": "BYTES", "shape": [1]}
TENSOR_BODY = json.dumps({"inputs": [{**INPUT, "data": [TEXT]}]}).encode()
BINARY_SIZE = {"parameters": {"binary_data_size": 4 + len(TEXT)}}
BINARY_HEAD = json.dumps({"inputs": [{**INPUT, **BINARY_SIZE}], "parameters": {"binary_data_output": True}}).encode()
BINARY_BODY = BINARY_HEAD + len(TEXT).to_bytes(4, "little") + TEXT.encode()
BINARY_FIELD = f"Inference-Header-Content-Length: {len(BINARY_HEAD)}"
WARM_UP = 1.0
MOST = 1.25
"""Most of a bare server's time that the gRPC port may take beyond the native route's."""
MOST_OF_NATIVE = {COMPLETIONS: 1.3, TENSOR: 1.5, BINARY: 1.5}

Load = Callable[[float], int]
"""Takes seconds, and returns the number of requests that were answered."""
Doors = Mapping[str, tuple[Server, Load]]


class Spent(NamedTuple):
    """CPU time of a request in µs: in the process that holds the connections, and in all of the server's."""

    front: float
    whole: float


Round = Mapping[str, Spent]


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time for each request, door by door.")
    parser.add_argument("--rounds", type=int, default=9, help="of the CPU time (default %(default)d)")
    parser.add_argument("--seconds", type=int, default=2, help="of each of its loads (default %(default)d)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("doors", rounds=options.rounds, seconds=options.seconds, pinning=stand.PINNING)
    with _doors() as doors:
        for _, load in doors.values():
            load(WARM_UP)
        rounds = [_round(doors, options.seconds, bool(number % 2)) for number in range(options.rounds)]
    _report(findings, rounds)
    return findings.close()


def _report(findings: Findings, rounds: list[Round]) -> None:
    rows: list[dict[str, object]] = []
    for name in rounds[0]:
        times = [turn[name].front for turn in rounds]
        rows.append(
            {
                "door": name,
                "µs/request": statistics.median(times),
                "least": min(times),
                "most": max(times),
                "with its workers": statistics.median([turn[name].whole for turn in rounds]),
                "x native": _ratio(rounds, name, NATIVE),
            }
        )
    findings.table("CPU time of the process that holds the connections; medians", rows)
    for name, most in MOST_OF_NATIVE.items():
        findings.at_most(f"{name}, beside the native route", _ratio(rounds, name, NATIVE), most, "x")
    ratio = statistics.median([(turn[GRPC].front - turn[NATIVE].front) / turn[BARE].front for turn in rounds])
    findings.at_most("the gRPC port without the native route, beside the bare server", ratio, MOST, "x")
    if TRITON in rounds[0]:
        whole = statistics.median([turn[INFER].whole / turn[TRITON].whole for turn in rounds])
        findings.say(
            f"ModelInfer beside Triton's: {_ratio(rounds, INFER, TRITON):.2f} x, with the workers {whole:.2f} x."
        )
    else:
        findings.say("There is no Triton; make triton installs it.")


def _ratio(rounds: list[Round], one: str, other: str) -> float:
    """Time by one door to that by another; median of the ratios within a round."""
    return statistics.median([turn[one].front / turn[other].front for turn in rounds])


@contextmanager
def _doors() -> Iterator[Doors]:
    """Doors by name, each with its server and its load."""
    port = stand.free_port()
    flags = ["--grpc-port", str(port), "--max-batch-size", str(IN_HAND)]
    flags += ["--policy", "window", "--max-wait-ms", str(WAIT_MS)]
    target = "bench/stand/targets.py:upper"
    with ExitStack() as stack:
        server = stack.enter_context(stand.headway(target, *flags, "--log-level", "warning", name="doors"))
        bare, bare_port = stack.enter_context(_bare_server())
        tensors = f"{server.url}/v2/models/default/infer"
        doors: dict[str, tuple[Server, Load]] = {
            NATIVE: (server, lambda time: posts(f"{server.url}/v1/predict", BODY, time)),
            COMPLETIONS: (server, lambda time: posts(f"{server.url}/v1/completions", PROMPT, time)),
            TENSOR: (server, lambda time: posts(tensors, TENSOR_BODY, time)),
            BINARY: (server, lambda time: posts(tensors, BINARY_BODY, time, BINARY_FIELD)),
            GRPC: (server, lambda time: calls(port, time)),
            INFER: (server, lambda time: calls(port, time, "--infer", "default")),
            BARE: (bare, lambda time: calls(bare_port, time)),
        }
        if triton_server.is_installed():
            its_port = stand.free_port()
            triton = stack.enter_context(triton_server.upper(grpc_port=its_port, delay_ms=WAIT_MS))
            doors[TRITON] = triton, lambda time: calls(its_port, time, "--infer", "upper")
        yield doors


def _round(doors: Doors, seconds: float, backwards: bool) -> Round:
    order = list(doors)
    if backwards:
        order.reverse()
    spent = {name: measure(*doors[name], seconds) for name in order}
    return {name: spent[name] for name in doors}


def measure(server: Server, load: Load, seconds: float) -> Spent:
    """Return the CPU time of a request under a load of so many seconds."""
    before = server.usage()
    answered = load(seconds)
    spent = generators.spent(before, server.usage())
    each = 1e6 / max(1, answered)
    return Spent(spent.get("front", 0.0) * each, sum(spent.values()) * each)


def posts(url: str, body: bytes, seconds: float, *fields: str, in_hand: int = IN_HAND) -> int:
    """Return the number of answered posts of a closed loop."""
    done = generators.closed_loop(url, body, seconds, in_hand, fields)
    if done.errors:
        raise Broken(f"{done.errors} of {done.requests} posts failed")
    return done.requests


def calls(port: int, seconds: float, *more: str, in_hand: int = IN_HAND) -> int:
    """Return the number of answered calls of a closed loop."""
    command = [sys.executable, "bench/stand/grpc_client.py", f"127.0.0.1:{port}", "--seconds", f"{seconds:g}", *more]
    command += ["--calls", str(in_hand)]
    done = subprocess.run(
        stand.on_load_core(command), cwd=stand.ROOT, capture_output=True, text=True, timeout=seconds + 90, check=False
    )
    if done.returncode:
        raise Broken(f"the calls ended with {done.returncode}: {done.stderr[-2000:]}")
    outcomes: dict[str, int] = json.loads(done.stdout)
    if outcomes["failed"]:
        raise Broken(f"{outcomes['failed']} calls failed")
    return outcomes["answered"]


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
