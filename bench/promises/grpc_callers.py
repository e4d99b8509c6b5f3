"""Clients of the gRPC port, whose history reads as that of `callers`."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc

from bench.promises.callers import PATIENCE, History, Request
from headway.grpc import messages

PREDICT = "/headway.v1.Inference/Predict"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


class GrpcCallers:
    """Clients with one channel, open-loop. Build it in a running loop.

    Arguments:
        target: whom they ask, as HOST:PORT.
        authority: certificate in PEM format by which they check that.
        rate: mean calls per second, Poisson.
        seed: of the dice.

    Attributes:
        history: so far.
    """

    def __init__(self, target: str, authority: bytes, rate: float, seed: int) -> None:
        self.history = History()
        self._channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority), options=OPTIONS)
        self._call = self._channel.unary_unary(PREDICT)
        self._request = messages.message("headway.v1.PredictRequest")
        self._answer = messages.message("headway.v1.PredictResponse")
        self._rate = rate
        self._rng = random.Random(f"grpc callers {seed}")
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def end_load(self) -> None:
        """Send no more."""
        self._over.set()

    async def run(self) -> History:
        """Send until `end_load`; returns when each call has its outcome."""
        due = self._loop.time()
        asked: set[asyncio.Task[None]] = set()
        try:
            while not self._over.is_set():
                due += self._rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                task = self._loop.create_task(self._ask(due))
                asked.add(task)
                task.add_done_callback(asked.discard)
            await asyncio.gather(*asked)
        finally:
            await self._channel.close()
        return self.history

    async def _ask(self, due: float) -> None:
        request = Request(f"call {len(self.history.requests):09d}", due, self._loop.time())
        self.history.requests.append(request)
        body: Any = self._request(input_data=request.text.encode()).SerializeToString()
        try:
            answer = await self._call(body, timeout=PATIENCE)
        except grpc.aio.AioRpcError as exc:
            self.history.end(request, f"{exc.code().name} {exc.details()}"[:120], self._loop.time())
            return
        right = self._answer.FromString(answer).output == request.text.upper().encode()
        self.history.end(request, "ok" if right else "wrong", self._loop.time(), "" if right else repr(answer[:200]))
