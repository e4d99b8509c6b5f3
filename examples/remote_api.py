"""A remote batch API to try Headway with: one machine that serves batches over HTTP.

    python examples/remote_api.py --port 9100
    headway serve http://127.0.0.1:9100/batch --workers 1

POST /batch takes a JSON list of 1 to `--max` strings, or {"inputs": […]}, and answers the texts in capitals in the
same shape, {"outputs": […]} for the latter. A batch takes `--ms` whatever is in it; `--gpus` run at once (ask for as many
`--workers`), others wait, or beyond `--queue` are turned away with 429 and Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import Any

from aiohttp import web


class RemoteAPI:
    """The API's one route.

    Arguments:
        seconds: run time of a batch.
        largest: most inputs it takes.
        gpus: batches that run at once.
        queue: batches that may wait; None for any number.
    """

    def __init__(self, seconds: float, largest: int, gpus: int, queue: int | None) -> None:
        self.seconds, self.largest = seconds, largest
        self.free = asyncio.Semaphore(gpus)
        self.room = None if queue is None else queue + gpus
        self.present = 0

    async def batch(self, request: web.Request) -> web.Response:
        try:
            body: Any = await request.json()
        except (ValueError, RecursionError):
            return _refusal("the body is not JSON", 400)
        wrapped = isinstance(body, dict)
        inputs = body.get("inputs") if isinstance(body, dict) else body
        if not isinstance(inputs, list) or not all(isinstance(text, str) for text in inputs):
            return _refusal('expected a list of strings, or {"inputs": […]}', 422)
        if not 1 <= len(inputs) <= self.largest:
            return _refusal(f"{len(inputs)} inputs; a batch has 1 to {self.largest}", 422)
        if self.room is not None and self.present >= self.room:
            return _refusal("busy", 429, {"Retry-After": "1"})
        self.present += 1
        try:
            async with self.free:
                await asyncio.sleep(self.seconds)
        finally:
            self.present -= 1
        outputs = [text.upper() for text in inputs]
        return web.json_response({"outputs": outputs} if wrapped else outputs)


def _refusal(reason: str, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)


def main() -> None:
    parser = argparse.ArgumentParser(description="A remote batch API to try Headway with.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--ms", type=float, default=100.0, help="run time of a batch")
    parser.add_argument("--max", type=int, default=100, help="largest batch")
    parser.add_argument("--gpus", type=int, default=1, help="batches that run at once")
    parser.add_argument("--queue", type=int, default=None, help="batches that may wait; more get 429")
    options = parser.parse_args()
    api = RemoteAPI(options.ms / 1000.0, options.max, options.gpus, options.queue)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/batch", api.batch)
    web.run_app(app, host=options.host, port=options.port, access_log=None, print=partial(print, flush=True))


if __name__ == "__main__":
    main()
