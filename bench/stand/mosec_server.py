"""The peer: mosec serving the same function on the same route, with its own defaults otherwise.

    python bench/stand/mosec_server.py --address 127.0.0.1 --port 8000

With BENCH_MSGSPEC set, JSON is decoded and encoded by msgspec, which mosec does not do by itself. BENCH_BATCH_MS is the
time that a batch takes, BENCH_WORKERS the number of worker processes.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
from mosec import Server, Worker

MAX_BATCH = int(os.environ.get("BENCH_MAX_BATCH", "64"))
MAX_WAIT_MS = int(os.environ.get("BENCH_MAX_WAIT_MS", "2"))
BATCH_SECONDS = float(os.environ.get("BENCH_BATCH_MS", "0")) / 1000.0
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))
FAST_JSON = bool(os.environ.get("BENCH_MSGSPEC"))


class Upper(Worker):
    """Each input in capitals."""

    def forward(self, data: list[Any]) -> list[Any]:
        if BATCH_SECONDS:
            time.sleep(BATCH_SECONDS)
        return [{"output": body["input"].upper()} for body in data]


class FastUpper(Upper):
    """The same with msgspec's JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._decode = msgspec.json.Decoder().decode
        self._encode = msgspec.json.Encoder().encode

    def deserialize(self, data: bytes) -> Any:
        return self._decode(data)

    def serialize(self, data: Any) -> bytes:
        return self._encode(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        FastUpper if FAST_JSON else Upper,
        num=WORKERS,
        max_batch_size=MAX_BATCH,
        max_wait_time=MAX_WAIT_MS,
        route="/v1/inference",
    )
    server.run()
