"""Clients behind a load balancer, over HTTP and gRPC, and the history of their requests.

Load is open-loop. Each request is a different string and has one outcome:

    ok             the right answer
    an error       status and code of a refusal or failure, such as `503 no_workers`
    wrong          an answer that isn't the right one for this string
    cut            the connection was closed without an answer
    silent         no answer within PATIENCE
    unreachable    no connection could be opened
"""

import asyncio
import math
import random
import ssl
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import uvloop

from headway import protos

PATIENCE = 40.0
"""Longer than any deadline of the service."""
IDLE_SECONDS = 5.0
"""Age at which an unused connection is closed, well before the service would."""
SHOWN = 8
"""Number of violations kept verbatim."""
PREDICT = "/headway.v1.Inference/Predict"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


@dataclass(slots=True)
class Request:
    """A request. `due` and `ended` are times of the loop's clock; `ended` is 0 until the request ends."""

    text: str
    due: float
    ended: float = 0.0
    outcome: str = ""


class History:
    """Requests in the order in which they fell due, and descriptions of the first violations."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.examples: list[str] = []

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests)

    @property
    def latencies(self) -> Sequence[float]:
        """Seconds from the due time to the right answer, ascending."""
        return sorted(request.ended - request.due for request in self.requests if request.outcome == "ok")


class _Load:
    def __init__(self, rate: float, seed: int) -> None:
        self.history = History()
        self.loop = asyncio.get_running_loop()
        self._rate, self._seed = rate, seed
        self._rng = random.Random(f"callers {seed}")
        self._end = math.inf

    def end_load(self) -> None:
        self._end = self.loop.time()

    async def run(self) -> History:
        """Send until `end_load`. Returns when each request has its outcome."""
        due, asked = self.loop.time(), set[asyncio.Task[None]]()
        try:
            while (due := due + self._rng.expovariate(self._rate)) < self._end:
                await asyncio.sleep(max(0.0, due - self.loop.time()))
                task = self.loop.create_task(self._send(due))
                asked.add(task)
                task.add_done_callback(asked.discard)
            await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await self._close()
        return self.history

    async def _send(self, due: float) -> None:
        history = self.history
        request = Request(f"caller {self._seed:08x}-{len(history.requests):09d} s'il vous plait", due)
        history.requests.append(request)
        request.outcome, example = await self._ask(request.text)
        request.ended = self.loop.time()
        if example and len(history.examples) < SHOWN:
            history.examples.append(f"{request.outcome}: {request.text!r}: {example}")

    async def _ask(self, text: str) -> tuple[str, str]:
        """Send a request. Returns its outcome, and a description of what is wrong."""
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError


class Callers(_Load):
    """Clients over HTTP/1.1. For https:// URLs they verify with `trust`. Build it in a running loop."""

    def __init__(self, url: str, rate: float, seed: int, trust: ssl.SSLContext | None = None) -> None:
        super().__init__(rate, seed)
        self._url = f"{url}/v1/inference"
        connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=trust or True)
        self._session = aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(PATIENCE))

    async def _ask(self, text: str) -> tuple[str, str]:
        try:
            async with self._session.post(self._url, json={"input": text}) as answer:
                content = await answer.json(content_type=None)
        except TimeoutError as exc:
            return "silent", repr(exc)
        except aiohttp.ClientConnectorError as exc:
            return "unreachable", repr(exc)
        except ValueError as exc:
            return f"{answer.status}" if answer.status != 200 else "wrong", repr(exc)
        except (aiohttp.ClientError, OSError) as exc:
            return "cut", repr(exc)
        fields: dict[str, Any] = content if isinstance(content, dict) else {}
        if answer.status != 200:
            return f"{answer.status} {str(fields.get('error', '')).lower()}".strip(), ""
        return ("ok", "") if fields.get("output") == text.upper() else ("wrong", repr(fields)[:200])

    async def _close(self) -> None:
        await self._session.close()


class GrpcCallers(_Load):
    """Clients over one gRPC channel to HOST:PORT, which verify with a certificate in PEM. Build it in a running loop."""

    def __init__(self, target: str, authority: bytes, rate: float, seed: int) -> None:
        super().__init__(rate, seed)
        self._channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority), options=OPTIONS)
        self._call = self._channel.unary_unary(PREDICT)
        self._request = protos.message("headway.v1.PredictRequest")
        self._answer = protos.message("headway.v1.PredictResponse")

    async def _ask(self, text: str) -> tuple[str, str]:
        body: Any = self._request(input_data=text.encode()).SerializeToString()
        try:
            answer = await self._call(body, timeout=PATIENCE)
        except grpc.aio.AioRpcError as exc:
            return f"{exc.code().name} {exc.details()}"[:120], ""
        right = self._answer.FromString(answer).output == text.upper().encode()
        return ("ok", "") if right else ("wrong", repr(answer[:200]))

    async def _close(self) -> None:
        await self._channel.close()


def loop_factory() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
