"""mosec as a peer: the same function on the same route, otherwise with mosec's defaults.

    python bench/stand/mosec_server.py --address 127.0.0.1 --port 8000

BENCH_MAX_BATCH, BENCH_MAX_WAIT_MS and BENCH_WORKERS configure it. BENCH_MSGSPEC replaces its JSON with msgspec. peer_models.py has the function.
"""

import os
from typing import Any

import msgspec
from mosec import Server, Worker

from bench.stand import peer_models

MAX_BATCH = int(os.environ.get("BENCH_MAX_BATCH", "64"))
MAX_WAIT_MS = int(os.environ.get("BENCH_MAX_WAIT_MS", "2"))
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))
FAST_JSON = bool(os.environ.get("BENCH_MSGSPEC"))


class Peer(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._run = peer_models.made()

    def forward(self, data: list[Any]) -> list[Any]:
        return [{"output": output} for output in self._run([body["input"] for body in data])]


class FastPeer(Peer):
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
        FastPeer if FAST_JSON else Peer,
        num=WORKERS,
        max_batch_size=MAX_BATCH,
        max_wait_time=MAX_WAIT_MS,
        route="/v1/inference",
    )
    server.run()
