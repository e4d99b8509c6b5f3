"""Mailbox of one gateway.

It reads each queue's stream on from the last id, and keeps replies until the gateway asks on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from headway.brokers.redis import wire
from headway.brokers.redis.shard_queue import Queue, Receipt
from headway.errors import BrokerUnavailable
from headway.model import Reply

log = structlog.get_logger(__name__)

FIRST = b"0-0"
"""Id before all others of a stream."""


@dataclass(slots=True)
class _Read:
    """Replies of one stream entry, and their queue. `born` names the server's state that it belongs to."""

    queue: Queue
    born: float
    id: bytes
    replies: list[Reply]


@dataclass(slots=True)
class _Stream:
    """Position up to which a queue's stream was read. `epoch` names the server's state that the id belongs to."""

    queue: Queue
    last: bytes = FIRST
    epoch: float = 0.0
    task: asyncio.Task[None] | None = field(default=None)


class Mailbox:
    """Replies to one gateway out of all queues.

    Arguments:
        gateway: id of the gateway.
        queues: the queues.
    """

    def __init__(self, gateway: str, queues: Sequence[Queue]) -> None:
        self._gateway = gateway
        self._streams = [_Stream(queue) for queue in queues]
        self._reads: list[_Read] = []
        self._acknowledged = 0
        self._arrival = asyncio.Event()
        self._broken: BrokerUnavailable | None = None

    async def replies(self, after: int) -> tuple[Sequence[Reply], int]:
        """See Broker.replies."""
        self._acknowledge(after)
        self._broken = None  # What broke since is tried again before anybody is told.
        for stream in self._streams:
            if stream.task is None or stream.task.done():
                stream.task = asyncio.get_running_loop().create_task(self._read_on(stream))
        while not self._reads:
            if self._broken is not None:
                raise self._broken
            self._arrival.clear()
            await self._arrival.wait()
        replies = [reply for read in self._reads for reply in read.replies]
        return replies, self._acknowledged + len(replies)

    def add(self, queues: Iterable[Queue]) -> None:
        """Read out of these queues too, at once if somebody waits for replies."""
        added = [_Stream(queue) for queue in queues]
        reads = any(stream.task is not None and not stream.task.done() for stream in self._streams)
        self._streams += added
        if reads:
            for stream in added:
                stream.task = asyncio.get_running_loop().create_task(self._read_on(stream))

    async def close(self) -> None:
        """Stop reading."""
        tasks = [stream.task for stream in self._streams if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _acknowledge(self, cursor: int) -> None:
        """Let go of the replies up to `cursor`, and tell the queues that they were read."""
        done = 0
        for read in self._reads:
            if self._acknowledged + len(read.replies) > cursor:
                break
            self._acknowledged += len(read.replies)
            done += 1
            if read.born in (
                0.0,
                read.queue.born,
            ):  # Otherwise it was lost meanwhile, and another may have the same id.
                keys = [wire.name_of(reply.tenant, reply.id, reply.nonce) for reply in read.replies]
                read.queue.read(Receipt(self._gateway, read.id, keys))
        del self._reads[:done]

    async def _read_on(self, stream: _Stream) -> None:
        try:
            while True:
                if stream.epoch != stream.queue.born:  # The server has lost its state: ids begin anew.
                    stream.epoch, stream.last = stream.queue.born, FIRST if stream.epoch else stream.last
                await self._read_once(stream)
        except BrokerUnavailable as exc:
            self._broken = exc
            self._arrival.set()

    async def _read_once(self, stream: _Stream) -> None:
        connection, key = stream.queue.connection, stream.queue.stream_of(self._gateway)
        for id, fields in await connection.stream(key, stream.last):
            stream.last = id
            try:
                replies = wire.read_outcomes(fields)
            except wire.UNREADABLE as exc:
                # To wait for a release that can read it would keep back all that follow; these end by their deadlines.
                log.error("replies cannot be read", gateway=self._gateway, error=wire.reason(exc))
                continue
            self._reads.append(_Read(stream.queue, stream.queue.born, id, replies))
            self._arrival.set()
