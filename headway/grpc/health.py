"""Health service of the port: `grpc.health.v1.Health`.

The process as a whole, under the empty name, and every service have the same status: SERVING if this process should get traffic,
like `/readyz`. When the process goes down, everybody who watches learns it at once.
"""

from __future__ import annotations

import asyncio

from headway.doors.fields import ID_PREFIX
from headway.doors.readiness import AGE, CachedReadiness
from headway.errors import NotFound
from headway.grpc import messages
from headway.grpc.call_stream import CallStream, to_be_opened_anew
from headway.grpc.calls import PortContext, StreamCall
from headway.grpc.statuses import Metadata
from headway.model import Principal

_REQUEST = messages.message("grpc.health.v1.HealthCheckRequest")
_RESPONSE = messages.message("grpc.health.v1.HealthCheckResponse")
_LIST = messages.message("grpc.health.v1.HealthListResponse")

UP = _RESPONSE.SERVING
DOWN = _RESPONSE.NOT_SERVING
UNKNOWN = _RESPONSE.SERVICE_UNKNOWN

NAMES = frozenset(("", *messages.SERVICES))


class Health:
    """Statuses of one process. `leaving` is set when the process goes down."""

    def __init__(self, glance: CachedReadiness) -> None:
        self._glance = glance
        self.leaving = asyncio.Event()

    async def ready(self) -> bool:
        return bool(await self.status() == UP)

    async def status(self) -> int:
        """Return the status, which all names share."""
        if self.leaving.is_set():
            return int(DOWN)
        serving = await self._glance.serving()
        return int(UP if serving and not self.leaving.is_set() else DOWN)

    async def check(self, body: bytes, principal: Principal) -> bytes:
        name = messages.read(_REQUEST, body).service
        if name not in NAMES:
            raise NotFound("no service of this name is served here")
        return bytes(_RESPONSE(status=await self.status()).SerializeToString())

    async def list(self, body: bytes, principal: Principal) -> bytes:
        answer, status = _LIST(), await self.status()
        for name in sorted(NAMES):
            answer.statuses[name].status = status
        return bytes(answer.SerializeToString(deterministic=True))


class WatchCall(StreamCall):
    """One call of Watch, which sends the status at once, and then whenever it has changed."""

    __slots__ = ("_health",)

    def __init__(self, port: PortContext, stream: CallStream, health: Health) -> None:
        super().__init__(port, stream)
        self._health = health

    async def talk(self) -> Metadata:
        self.shown = ID_PREFIX + self.port.entrance.new_id()
        self.belong_to_address()
        name = messages.read(_REQUEST, await self.read()).service
        self.drop(self.kept)
        sent = -1
        while True:
            status = await self._health.status() if name in NAMES else int(UNKNOWN)
            if status != sent:
                sent = status
                await self.send(_RESPONSE(status=status).SerializeToString())
            if self.retired:
                raise to_be_opened_anew()
            await self.pause(AGE)
