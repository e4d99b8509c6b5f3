"""Memory and time that the departure board takes with 1, 20 and 100 processes that report for half an hour.

    python bench/cost/board.py                    about two minutes
    python bench/cost/board.py --processes 20     one fleet

Half of the processes are gateways, each with 50 requests a second in three tiers; half are workers, each with 10 batches a second.
The broker's clock is ours, so that half an hour takes as long as its 1,800 notices of each process do; nothing of the
board becomes too old meanwhile by the server's own clock, so that what is shown is its bound by bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.stand.findings import Findings
from headway.brokers.memory.board import MemoryBoard
from headway.brokers.redis.board import RedisBoard
from headway.brokers.redis.connection import RedisConnection
from headway.core.departure_board import HISTORY_SECONDS, RECENT_BYTES, STEP
from headway.model.board import ARRIVED, BatchDeparture, FleetFigures, HistoryRow, Notice, RequestFlow
from headway.ports import Board
from tests.servers.redis import RedisServer

FLEETS = (1, 20, 100)
ROWS_BYTES = 1 << 20
"""Most that the rows of the history may take."""
KEYS = "headway:{fleet}:"


class Clock:
    """Clock that stands still until it is set."""

    now = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and time that the departure board takes.")
    parser.add_argument("--processes", type=int, action="append", help="of one fleet; may be repeated")
    fleets = parser.parse_args().processes or FLEETS
    findings = Findings("board", seconds=HISTORY_SECONDS)
    rows = [row for count in fleets for row in (in_memory(count), over_redis(count))]
    findings.table(f"{HISTORY_SECONDS} s of reports", rows)
    for row in rows:
        name = f"{row['processes']} processes, {row['board']}:"
        findings.at_least(f"{name} history", float(str(row["history s"])), HISTORY_SECONDS - 2 * STEP, "s")
        if row["rows KiB"] is not None:
            findings.at_most(f"{name} rows", float(str(row["rows KiB"])), ROWS_BYTES / 1024, "KiB")
            findings.at_most(f"{name} notices", float(str(row["notices KiB"])), 1.25 * RECENT_BYTES / 1024, "KiB")
    return findings.close()


def in_memory(processes: int) -> dict[str, object]:
    """Row of the board of one process, were it to have so many."""
    clock = Clock()
    board = MemoryBoard(lambda: clock.now)
    return asyncio.run(reported([board], clock, processes)) | {"rows KiB": None, "notices KiB": None}


def over_redis(processes: int) -> dict[str, object]:
    """Row of the board in a server."""
    with tempfile.TemporaryDirectory(prefix="headway-board-") as folder, RedisServer("valkey", Path(folder)) as server:

        async def run() -> dict[str, object]:
            clock = Clock()
            links = [RedisConnection(server.url, timeout=math.inf, clock=lambda: clock.now) for _ in range(8)]
            for link in links:
                await link.open()
            before = cpu(server)
            row = await reported([RedisBoard(link) for link in links], clock, processes)
            row["server µs a notice"] = round(1e6 * (cpu(server) - before) / (processes * HISTORY_SECONDS), 1)
            for link in links:
                await link.close()
            return row

        row = asyncio.run(run())
        keys = [key for key in server.ends() if key.startswith(f"{KEYS}row:")]
        row["rows KiB"] = round(sum(int(server.command("MEMORY", "USAGE", key)) for key in keys) / 1024)
        row["notices KiB"] = round(int(server.command("MEMORY", "USAGE", f"{KEYS}board")) / 1024)
    return row


async def reported(boards: Sequence[Board], clock: Clock, processes: int) -> dict[str, object]:
    """Row of a board to which so many processes have reported for half an hour."""
    rng = random.Random(3)
    for _ in range(HISTORY_SECONDS):
        clock.now += 1.0
        notices = [notice(f"process-{number}", number, clock.now, rng) for number in range(processes)]
        by_board = [notices[number :: len(boards)] for number in range(len(boards))]
        await asyncio.gather(*(posted(board, own) for board, own in zip(boards, by_board, strict=True)))
    began = time.perf_counter()
    rows, news = await boards[0].history()
    took = time.perf_counter() - began
    assert sum(row.ended for row in rows[:-1]) > 0
    return {
        "processes": processes,
        "board": type(boards[0]).__name__,
        "history s": span(rows),
        "departures s": round(clock.now - news.notices[0].at),
        "read ms": round(took * 1000, 1),
        "notices": len(news.notices),
    }


async def posted(board: Board, notices: Sequence[Notice]) -> None:
    """Post one notice after the other."""
    for one in notices:
        await board.post(one)


def span(rows: Sequence[HistoryRow]) -> int:
    """Seconds that rows span."""
    return (rows[-1].step - rows[0].step + 1) * STEP


def notice(process: str, number: int, now: float, rng: random.Random) -> Notice:
    """Notice of a second of a gateway, or of a worker with one GPU."""
    if number % 2:
        batches = tuple(
            BatchDeparture(
                f"{process}/gpu-0", "model", "1", now - 1 + part / 10, 5, 0.31, "headway", (1, 2, 2), 0.08, ARRIVED
            )
            for part in range(10)
        )
        return Notice(process, batches)
    latencies: dict[str, dict[int, int]] = {tier: {} for tier in ("enterprise", "paid", "free")}
    for count in range(50):
        of_tier, bucket = latencies[("enterprise", "paid", "free")[count % 3]], min(int(rng.gauss(11, 2.5)), 25)
        of_tier[bucket] = of_tier.get(bucket, 0) + 1
    flow = RequestFlow(
        1.0, {tier: sum(found.values()) for tier, found in latencies.items()}, {"shed": 2}, {"shed": 2}, {"model": 52},
        latencies,
    )  # fmt: skip
    figures = FleetFigures((1, 5, 40), (0.1, 0.2, 0.7), 3000.0, 2550.0, 50, 50) if number == 0 else None
    return Notice(process, flow=flow, fleet=figures)


def cpu(server: RedisServer) -> float:
    """Seconds of processor time that the server has had."""
    info = server.command("INFO", "CPU")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


if __name__ == "__main__":
    sys.exit(main())
