"""A program that asks a running service.

    headway serve examples/emulated_gpu.py:EmulatedGPU
    python examples/client.py

Asks one thing, many things at once, and one thing for later. The address is the first argument, if there is one.
"""

from __future__ import annotations

import sys

import headway


def main(url: str) -> None:
    with headway.Client(url) as client:
        result = client.infer("hello")
        print(f"{result.output}  ({result.latency_ms} ms, {result.request_id})")

        results = client.infer_many(f"text {number}" for number in range(20))
        print(", ".join(result.output for result in results))

        task = client.submit("later")
        print(task.result(timeout=30).output)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
    except headway.client.ClientError as error:
        sys.exit(f"client: {error}")
