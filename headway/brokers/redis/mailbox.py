"""Mailbox of one gateway.

It reads each queue's stream, and keeps replies until the gateway asks for later replies. A reply whose output is stored apart
arrives once the output is read, without delaying others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.brokers.redis.receipts import Receipt
from headway.brokers.redis.shard_queue import Queue
from headway.core import failures
from headway.errors import BrokerUnavailable
from headway.model import Reply, Submission, Value
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

READ_AGAIN = 0.1
"""Seconds after which an output is read again if the broker didn't answer."""
FIRST = b"0-0"
"""Id before all others of a stream."""


_submission: Callable[[Reply], Submission] = attrgetter("tenant", "id", "nonce")


class _Read(msgspec.Struct):
    """Replies of one stream entry that become available together.

    Attributes:
        key: key of the stream.
        born: birth of the queue's state to which the entry belongs.
        whole: all submissions that the entry answers.
        token: token of the output that the replies share, if it is stored apart.
        wanted: number of submissions that wait for the output while it is read.
    """

    queue: Queue
    key: str
    born: float
    id: bytes
    whole: list[Submission]
    replies: list[Reply]
    token: str = ""
    wanted: int = 0


@dataclass(slots=True)
class _Stream:
    """Read position in a queue's stream. `epoch` is the birth of the queue's state to which the `last` id belongs."""

    queue: Queue
    last: bytes = FIRST
    epoch: float = 0.0
    task: asyncio.Task[None] | None = field(default=None)


class Mailbox:
    """Replies to one gateway from all queues."""

    def __init__(self, gateway: str, queues: Sequence[Queue]) -> None:
        self._gateway = gateway
        self._streams = [_Stream(queue) for queue in queues]
        self._reads: list[_Read] = []
        self._bringing: dict[asyncio.Task[None], _Read] = {}
        """Replies whose outputs are being read."""
        self._awaited: dict[Submission, _Read] = {}
        """The same replies by submission, without withdrawn submissions."""
        self._acknowledged = 0
        self._arrival = asyncio.Event()
        self._broken: BrokerUnavailable | None = None

    async def replies(self, after: int) -> tuple[Sequence[Reply], int]:
        self._acknowledge(after)
        self._broken = None  # Try again before reporting the failure.
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
        """Read these queues too, at once if somebody waits for replies."""
        added = [_Stream(queue) for queue in queues]
        reads = any(stream.task is not None and not stream.task.done() for stream in self._streams)
        self._streams += added
        if reads:
            for stream in added:
                stream.task = asyncio.get_running_loop().create_task(self._read_on(stream))

    async def remove(self, queues: Collection[Queue]) -> None:
        removed = [stream for stream in self._streams if stream.queue in queues]
        self._streams = [stream for stream in self._streams if stream.queue not in queues]
        await end(*(stream.task for stream in removed))

    def forget(self, submissions: Iterable[Submission]) -> None:
        """Stop reading outputs that only these submissions want. Their replies will lack the outputs."""
        for submission in submissions:
            read = self._awaited.pop(submission, None)
            if read is not None:
                read.wanted -= 1

    async def close(self) -> None:
        await end(*(stream.task for stream in self._streams), *self._bringing)

    def _acknowledge(self, cursor: int) -> None:
        """Drop the replies up to `cursor`, and give the queues receipts for them."""
        done = 0
        for read in self._reads:
            if self._acknowledged + len(read.replies) > cursor:
                break
            self._acknowledged += len(read.replies)
            done += 1
            # Replies of a lost state aren't reported, because another stream entry may have the same id.
            if read.born in (0.0, read.queue.born):
                all_here = len(read.replies) == len(read.whole)
                submissions = read.whole if all_here else list(map(_submission, read.replies))
                outputs = (
                    [read.token.encode() + wire.name_of(*submission) for submission in submissions]
                    if read.token
                    else []
                )
                read.queue.receipts.add(Receipt(self._gateway, read.id, submissions, outputs))
        del self._reads[:done]

    async def _read_on(self, stream: _Stream) -> None:
        try:
            while True:
                if stream.epoch != stream.queue.born:  # The server lost its state, so ids start again.
                    stream.epoch, stream.last = stream.queue.born, FIRST if stream.epoch else stream.last
                await self._read_once(stream)
        except BrokerUnavailable as exc:
            self._broken = exc
            self._arrival.set()

    async def _read_once(self, stream: _Stream) -> None:
        queue, key = stream.queue, stream.queue.stream_of(self._gateway)
        # After a loss of state, entries of the new state may have been read already.
        known = [*self._reads, *self._bringing.values()] if stream.last == FIRST else []
        for id, fields in await queue.connection.stream(key, stream.last):
            stream.last, apart = id, wire.Apart()
            try:
                replies = wire.read_outcomes(fields, apart)
            except wire.UNREADABLE as exc:
                # Their clients run into deadlines. To wait for a release that can read them would hold back all later replies.
                log.error("replies cannot be read", gateway=self._gateway, error=wire.reason(exc))
                continue
            whole = list(map(_submission, replies))
            if same := [read for read in known if (read.key, read.id, read.whole) == (key, id, whole)]:
                for read in same:
                    read.born = queue.born
                continue
            here = [reply for at, reply in enumerate(replies) if at not in apart] if apart else replies
            if here or not replies:
                self._reads.append(_Read(queue, key, queue.born, id, whole, here))
                self._arrival.set()
            of: dict[tuple[str, int], list[Reply]] = {}
            for at, named in apart.items():
                of.setdefault(named, []).append(replies[at])
            for (name, length), those in of.items():  # An output is read once for all replies that share it.
                read = _Read(queue, key, queue.born, id, whole, those, name[1:], len(those))
                self._awaited.update((_submission(reply), read) for reply in those)
                task = asyncio.get_running_loop().create_task(self._bring(read, name, length))
                self._bringing[task] = read
                task.add_done_callback(self._bringing.pop)

    async def _bring(self, read: _Read, name: str, length: int) -> None:
        output = await self._output(read, name, length)
        for reply in read.replies:
            self._awaited.pop(_submission(reply), None)
        failure = failures.lost_output() if output is None else None
        read.replies = [replace(reply, output=output, failure=failure) for reply in read.replies]
        self._reads.append(read)
        self._arrival.set()

    async def _output(self, read: _Read, name: str, length: int) -> Value | None:
        """Read an output, again and again if need be. None if it is lost or unwanted."""
        while True:
            try:
                return await read.queue.output_of(name, length, read.replies[0].tenant, lambda: read.wanted > 0)
            except BrokerUnavailable as exc:
                self._broken = exc
                self._arrival.set()
                await asyncio.sleep(READ_AGAIN)
