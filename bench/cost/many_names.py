"""Names that nobody serves: what is left of a hundred thousand models and versions that a client made up.

    python bench/cost/many_names.py                   100,000 names at `serve` and at a fleet, over HTTP and gRPC
    python bench/cost/many_names.py --names 10000     a first impression

Each name comes once, in the ways in which a request names a model or a version; each must be refused. Memory of the process that
answers, its metrics, its list of models and the keys of such names in Redis are looked at after a tenth of the names and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import urllib.request
from collections import Counter
from typing import Any

import aiohttp
import grpc
import msgspec
import uvloop

from bench.stand import fleet, stand
from bench.stand.findings import Findings
from headway.grpc import messages

AT_ONCE = 32
MOST_GROWTH_MIB = 8.0
FEW = 8
"""Series that a service begins with its first events, whoever causes them."""
_TENSORS = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
_PREDICT = "/headway.v1.Inference/Predict"


def main() -> int:
    parser = argparse.ArgumentParser(description="What is left of names that nobody serves.")
    parser.add_argument("--names", type=int, default=100_000, help="names for each service (default %(default)s)")
    options = parser.parse_args()
    stand.end_in_order()
    findings = Findings("many_names", names=options.names)
    with fleet.lone_service(stand.EMULATED_GPU, name="names", grpc=True) as made:
        _measure(findings, "serve", made, options.names)
    with fleet.emulated(20, 8, hosts=1, gpus=1, name="names", grpc=True) as made:
        _measure(findings, "fleet", made, options.names)
    return findings.close()


def _measure(findings: Findings, what: str, made: fleet.Fleet, names: int) -> None:
    door = made.doors[0]
    rows: list[dict[str, Any]] = []
    first = max(AT_ONCE, names // 10)
    answers: Counter[str] = Counter()
    for begin, end in ((0, first), (first, names)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            answers += runner.run(_name_them(door, begin, end))
        rows.append({"service": what, "names": end} | _state(made, door))
    findings.table(f"{what}: after so many names", rows)
    findings.table(f"{what}: answers", [{"answer": answer, "times": count} for answer, count in answers.items()])
    before, after = rows
    findings.none(f"{what}: names that were not refused", names - sum(answers[one] for one in ("404", "NOT_FOUND")))
    findings.at_most(f"{what}: growth", after["MiB"] - before["MiB"], MOST_GROWTH_MIB, "MiB")
    findings.at_most(f"{what}: series more", after["series"] - before["series"], FEW)
    findings.none(f"{what}: models more", after["models"] - before["models"])
    findings.none(f"{what}: keys in Redis of such names", after["keys"])


def _state(made: fleet.Fleet, door: stand.Server) -> dict[str, Any]:
    keys = 0
    if door in made.gateways:
        with made.redis.client() as client:
            keys = sum(1 for _ in client.scan_iter("*made-up*", count=1000))
    return {
        "MiB": sum(door.rss().values()) / 2**20,
        "series": len({name for name in door.metrics() if not name[0].endswith(("_created", "_bucket"))}),
        "models": len(_models(door)),
        "keys": keys,
    }


def _models(door: stand.Server) -> list[Any]:
    with urllib.request.urlopen(f"{door.url}/v1/models", timeout=10) as answer:
        found: list[Any] = msgspec.json.decode(answer.read())["data"]
        return found


async def _name_them(door: stand.Server, begin: int, end: int) -> Counter[str]:
    answers: Counter[str] = Counter()
    numbers = iter(range(begin, end))
    address = f"127.0.0.1:{door.grpc_port}"
    async with aiohttp.ClientSession() as session, grpc.aio.insecure_channel(address) as channel:

        async def go_on() -> None:
            for number in numbers:
                answers[await _ask(session, channel, door.url, number)] += 1

        await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
    return answers


async def _ask(session: aiohttp.ClientSession, channel: grpc.aio.Channel, url: str, number: int) -> str:
    """Answer to a request that names what nobody serves."""
    body: dict[str, Any]
    name = f"made-up-{number}"
    match number % 6:
        case 0:
            path, body = "/v1/inference", {"input": "a", "model": name}
        case 1:
            path, body = "/v1/inference", {"input": "a", "version": name}
        case 2:
            path, body = f"/v2/models/default/versions/{name}/infer", _TENSORS
        case 3:
            path, body = "/v1/completions", {"prompt": "a", "model": name}
        case 4:
            path, body = f"/v2/models/{name}/infer", _TENSORS
        case _:
            request = messages.message("headway.v1.PredictRequest")(input_data=b"a", model_id=name)
            try:
                await channel.unary_unary(_PREDICT)(request.SerializeToString())
            except grpc.aio.AioRpcError as refused:
                return str(refused.code().name)
            return "OK"
    async with session.post(url + path, json=body) as answer:
        await answer.read()
        return str(answer.status)


if __name__ == "__main__":
    raise SystemExit(main())
