"""LitServe as a peer: the same function on the same route, otherwise with LitServe's defaults.

    python bench/stand/litserve_server.py --port 8000

The variables are those of mosec_server.py and peer_models.py.
"""

import argparse
import os
from typing import Any

from litserve import LitAPI, LitServer

from bench.stand import peer_models

MAX_BATCH = int(os.environ.get("BENCH_MAX_BATCH", "64"))
MAX_WAIT_MS = int(os.environ.get("BENCH_MAX_WAIT_MS", "2"))
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))


class Peer(LitAPI):
    def setup(self, device: str) -> None:
        self.run = peer_models.made()

    def batch(self, inputs: list[dict[str, Any]]) -> list[Any]:
        return [body["input"] for body in inputs]

    def predict(self, inputs: list[Any], **kwargs: Any) -> list[Any]:
        return self.run(inputs)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any, **kwargs: Any) -> Any:
        return {"output": output}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LitServe, serving what BENCH_TARGET names.")
    parser.add_argument("--port", type=int, required=True)
    api = Peer(max_batch_size=MAX_BATCH, batch_timeout=MAX_WAIT_MS / 1000.0, api_path="/v1/inference")
    server = LitServer(api, accelerator="cpu", devices=1, workers_per_device=WORKERS)
    server.run(host="127.0.0.1", port=parser.parse_args().port, log_level="warning", generate_client_file=False)
