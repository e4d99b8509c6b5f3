"""Where the front process spends its time under full load.

    python bench/cost/hotspots.py                half a minute
    python bench/cost/hotspots.py --seconds 20   finer shares
    python bench/cost/hotspots.py --policy paced

The server is that of peer.py, with everything on, under wrk. Its CPU time per request is measured first, undisturbed.
Then two profilers look at the front process from outside, one after the other: perf, if it is installed, by the clock
of the CPU, for shared objects and their symbols; py-spy, by the wall clock, for Python functions and lines. py-spy
cannot tell running from waiting for a core, so the worker is moved to the other core meanwhile. It sees no frames of
compiled code: system calls and compiled libraries count for the line that calls them, and the event loop itself for
`Runner.run`. Shares are given in microseconds per request too: share × the front's CPU time per request.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cost.peer import BODY, MAX_BATCH, ROUTE, WAIT_MS, WARM_UP
from bench.stand import generators, stand
from bench.stand.findings import Findings
from bench.stand.stand import Broken, Server

HERTZ = 499
SHOWN = 25
_FRAME = re.compile(r"(?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)")
_PERF_ROW = re.compile(r"\s*(?P<share>[\d.]+)%\s+(?P<object>\S+)\s+(?:\[(?P<space>.)\] (?P<symbol>\S+))?")


def main() -> int:
    options = _options()
    stand.end_in_order()
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if not (spy and generators.has_wrk()):
        lacking = "py-spy: pip install py-spy" if not spy else "wrk: apt-get install wrk"
        print(f"This needs {lacking}", file=sys.stderr)
        return 2
    findings = Findings("hotspots", seconds=options.seconds, policy=options.policy, pinning=stand.PINNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys.toml"
        key = stand.write_key(keys)
        flags = ["--keys", str(keys), "--max-batch-size", str(MAX_BATCH), "--log-level", "warning"]
        flags += ["--policy", options.policy]
        if options.policy == "window":
            flags += ["--max-wait-ms", str(WAIT_MS)]
        with stand.headway(f"{stand.TARGETS}:upper", *flags, name="hotspots") as server:
            _profile(findings, server, key, options.seconds, spy, folder)
    return findings.close()


def _profile(findings: Findings, server: Server, key: str, seconds: float, spy: str, folder: Path) -> None:
    def load(duration: float) -> generators.Wrk:
        header = f"Authorization: Bearer {key}"
        return generators.closed_loop(f"{server.url}{ROUTE}", BODY, duration, headers=[header])

    load(WARM_UP)
    before = server.usage()
    done = load(seconds)
    cost = generators.spent(before, server.usage())
    front = cost["front"] / done.requests * 1e6
    worker = cost.get("worker", 0.0) / done.requests * 1e6
    sizes = server.total("headway_batch_size_sum") / max(1.0, server.total("headway_batch_size_count"))
    findings.say(
        f"Undisturbed: {front:.2f} µs CPU per request in the front process, {worker:.2f} in the worker, "
        f"{done.rate:,.0f} requests/s, {sizes:.1f} requests a batch."
    )
    findings.keep("undisturbed", {"front_us": front, "worker_us": worker, "requests_per_s": done.rate, "batch": sizes})
    for pid in server.worker_pids():
        stand.move_to_load_core(pid)
    if shutil.which("perf"):
        with _meanwhile(load, seconds + 2):
            rows = _perf(server.pid, seconds, folder)
        _show_perf(findings, rows, front)
    with _meanwhile(load, seconds + 2):
        stacks = _spy(spy, server.pid, seconds, folder)
    _show_stacks(findings, stacks, front)


@contextmanager
def _meanwhile(load: Callable[[float], object], seconds: float) -> Iterator[None]:
    """The load runs in the background."""
    thread = threading.Thread(target=load, args=(seconds,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _perf(pid: int, seconds: float, folder: Path) -> list[tuple[float, str, str]]:
    """Share in percent, shared object, symbol."""
    data = str(folder / "perf.data")
    record = ["perf", "record", "-e", "cpu-clock", "-F", str(HERTZ), "-p", str(pid), "-o", data]
    subprocess.run([*record, "sleep", f"{seconds:g}"], capture_output=True, check=False, timeout=seconds + 60)
    report = ["perf", "report", "-i", data, "--stdio", "--sort", "dso,symbol"]
    said = subprocess.run(report, capture_output=True, text=True, errors="replace", check=False, timeout=120)
    found = [match for line in said.stdout.splitlines() if (match := _PERF_ROW.match(line))]
    return [(float(match["share"]), match["object"], match["symbol"] or "") for match in found]


def _spy(spy: str, pid: int, seconds: float, folder: Path) -> Counter[tuple[str, ...]]:
    """Samples by stack, outermost frame first."""
    file = folder / "stacks"
    command = [spy, "record", "-p", str(pid), "-d", f"{max(1, round(seconds))}", "-r", str(HERTZ), "--nonblocking"]
    done = subprocess.run(
        [*command, "-f", "raw", "-o", str(file)], capture_output=True, text=True, check=False, timeout=seconds + 60
    )
    if done.returncode or not file.exists():
        raise Broken(f"py-spy ended with {done.returncode}: {done.stderr[-1000:]}")
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        frames, _, count = line.rpartition(" ")
        stacks[tuple(frames.split(";"))] += int(count)
    return stacks


def _show_perf(findings: Findings, rows: list[tuple[float, str, str]], front: float) -> None:
    if not rows:
        findings.say("perf may not look at processes here (kernel.perf_event_paranoid).")
        return
    objects: defaultdict[str, float] = defaultdict(float)
    for share, name, _ in rows:
        objects[name] += share
    most = sorted(objects.items(), key=lambda item: -item[1])[:12]
    findings.table("perf: shared objects", [_share(name, share / 100, front) for name, share in most])
    findings.table(
        "perf: symbols", [_share(f"{name}  {symbol}", share / 100, front) for share, name, symbol in rows[:SHOWN]]
    )


def _show_stacks(findings: Findings, stacks: Counter[tuple[str, ...]], front: float) -> None:
    total = max(1, stacks.total())
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for stack, count in stacks.items():
        name, file, line = _parts(stack[-1])
        files[file] += count
        functions[f"{file}  {name}"] += count
        lines[f"{file}:{line}  {name}"] += count
        inside = next((depth for depth, frame in enumerate(stack) if frame.startswith("Runner.run")), 0)
        seen = {f"{file}  {name}" for name, file, _ in map(_parts, stack[inside + 1 :]) if file.startswith("headway/")}
        for function in seen:
            inclusive[function] += count
    for title, counts in (
        ("py-spy: files, own time", files),
        ("py-spy: functions, own time", functions),
        ("py-spy: functions of headway, with all they call", inclusive),
        ("py-spy: lines, own time", lines),
    ):
        findings.table(title, [_share(what, count / total, front) for what, count in counts.most_common(SHOWN)])
    findings.keep("samples", total)


def _share(what: str, share: float, front: float) -> dict[str, object]:
    return {"where": what, "%": round(share * 100, 2), "µs/request": round(share * front, 2)}


def _parts(frame: str) -> tuple[str, str, str]:
    match = _FRAME.fullmatch(frame)
    return (match["name"], match["file"], match["line"]) if match else (frame, "", "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Where the front process spends its time under full load.")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each of three loads (default %(default)g)")
    parser.add_argument("--policy", choices=("window", "paced"), default="window", help="(default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
