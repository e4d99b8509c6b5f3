"""Open-loop load spread evenly over several gateways, by one process, with one report.

    python bench/stand/spread.py --rate 1000 --seconds 10 http://127.0.0.1:8000 http://127.0.0.1:8001

Each URL gets a Poisson stream of its own at its share of the rate; together they are one of the whole rate. Answers
are checked to be the input in capitals. The report is that of `headway bench --json`, over all streams.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import uvloop

from headway.load.generator import Generator
from headway.load.record import Record
from headway.load.report import make_report, to_json
from headway.load.spec import LoadSpec, parse_target


def main() -> int:
    parser = argparse.ArgumentParser(description="Open-loop load spread over several gateways.")
    parser.add_argument("urls", nargs="+", metavar="URL", help="of each gateway")
    parser.add_argument("--rate", type=float, required=True, help="requests per second over all of them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load (default %(default)g)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of arrivals (default: a new one)")
    options = parser.parse_args()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    whole = LoadSpec(
        target=parse_target(options.urls[0]), rate=options.rate, duration=options.seconds, seed=options.seed,
        expect="upper",
    )  # fmt: skip
    share = options.rate / len(options.urls)
    specs = [
        replace(whole, target=parse_target(url), rate=share, seed=options.seed + number)
        for number, url in enumerate(options.urls)
    ]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(drive(specs))
    report = make_report(whole, merged(records, whole.tiers), sys.argv, started_at)
    sys.stdout.buffer.write(to_json(report))
    return 0


async def drive(specs: Sequence[LoadSpec]) -> list[Record]:
    """All streams at once, each to its end."""
    return await asyncio.gather(*(Generator(spec, secrets.token_hex(4)).run() for spec in specs))


def merged(records: Sequence[Record], tiers: Sequence[str]) -> Record:
    """One record of all streams, as if one generator had sent them."""
    whole = Record(tiers)
    for record in records:
        for stream, part in zip(whole.streams, record.streams, strict=True):
            stream.answered.extend(part.answered)
            stream.refused.extend(part.refused)
            stream.refused_without_retry_after += part.refused_without_retry_after
            stream.failed.update(part.failed)
        whole.sent = [before + more for before, more in zip(whole.sent, record.sent, strict=True)]
        whole.lags.extend(record.lags)
        whole.mismatches += record.mismatches
        whole.mismatched += record.mismatched
        whole.waited += record.waited
        whole.opened += record.opened
        whole.peak += record.peak
        whole.last_answer = max(whole.last_answer, record.last_answer)
        whole.elapsed = max(whole.elapsed, record.elapsed)
        # Of the whole process, so the same time over for each stream.
        whole.cpu = max(whole.cpu, record.cpu)
        whole.interrupted = whole.interrupted or record.interrupted
    whole.dues.extend(sorted(due for record in records for due in record.dues))
    return whole


if __name__ == "__main__":
    sys.exit(main())
