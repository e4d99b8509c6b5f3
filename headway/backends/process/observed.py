"""Backend for a target under test. It records the inputs of each batch, and its child may be a thread of this process.

The thread calls user code and checks the outputs as a child process would. Because it is part of this process, a test can run,
inspect and replace objects that no other process could import. If a call hangs, the thread is abandoned, and another takes its place.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec

from headway.backends.process.backend import ProcessBackend, Spawn
from headway.backends.process.child import Pipe, attend
from headway.backends.process.child_process import Child, ChildProcess, Log, Message
from headway.backends.process.frames import Build, Computed
from headway.backends.process.group_guard import GroupGuard
from headway.backends.process.usercode import Target, UserLoop, prepare
from headway.config.target import FileTarget, ModuleTarget, ObservedTarget
from headway.core.values import as_json
from headway.core.weight_estimate import WeightEstimate
from headway.model import Entry, ItemResult, Tensors

_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder(Message | Computed).decode


class ThreadChild(Child):
    """A child that is a thread. It ignores the arguments that only a process needs."""

    def __init__(
        self,
        call: object,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        worker: str,
        log: Log,
        guard: GroupGuard | None = None,
        arena_bytes: int = 0,
    ) -> None:
        super().__init__(worker)
        self.pid = os.getpid()
        self._call, self._name = call, name
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._live, name=f"headway-{worker}", daemon=True).start()

    def catch_up(self) -> None: ...

    def kill(self, verdict: str = "") -> None:
        """Abandon the thread, which ends after its batch."""
        self.hang_up()
        self._loop.call_soon(self._finish, verdict)

    def hang_up(self) -> None:
        self.doomed = True
        self.gone.set()
        self._queue.put(None)

    def resident_bytes(self) -> int:
        return 0

    def _send(self, content: bytes) -> None:
        self._queue.put(content)

    def _live(self) -> None:
        loop = UserLoop()

        def find(build: Build, loop: UserLoop) -> Target:
            return prepare(self._call, self._name, "", loop, build.arguments)

        try:
            attend(_Words(self._queue, self._tell), loop, self._name, find)
        finally:
            loop.close()
            self._soon(self._finish, "has ended")

    def _tell(self, content: bytes) -> None:
        self._soon(self._hear, _decode(content))

    def _soon(self, act: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may be closed.
            self._loop.call_soon_threadsafe(act, *arguments)

    def _finish(self, cause: str) -> None:
        self.doomed = True
        self.cause = self.how = self.cause or cause
        self._over()


class _Words(Pipe):
    """A thread's pipe, which uses a queue. Unlike in a process, the target's background tasks don't run between batches."""

    holds = True

    def __init__(self, queue: SimpleQueue[bytes | None], tell: Any) -> None:
        self.fd, self.arena = -1, None
        self._queue, self._tell = queue, tell

    def receive(self) -> bytes | None:
        return self._queue.get()

    def send(self, word: Message | Computed) -> None:
        self._tell(_encode(word))


class ObservedBackend(ProcessBackend):
    """Backend that records each batch. A target named by module or file runs in a process, any other in a thread."""

    def __init__(
        self,
        target: ObservedTarget,
        worker: str,
        device: str,
        start_timeout: float,
        log: Log,
        guard: GroupGuard | None,
        weights: WeightEstimate | None = None,
    ) -> None:
        subject = target.subject
        if isinstance(subject, ModuleTarget | FileTarget):
            spec: ModuleTarget | FileTarget = subject
            spawn: Spawn = ChildProcess
        else:
            spec, spawn = ModuleTarget("", str(target)), partial(ThreadChild, subject, str(target))
        super().__init__(
            spec,
            worker=worker,
            device=device,
            start_timeout=start_timeout,
            log=log,
            guard=guard,
            weights=weights,
            spawn=spawn,
        )
        self._batches = target.batches

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        if entries[0].gateway:
            self._batches.append([_built(entry.input) for entry in entries])
        return await super().run(entries, timeout)


def _built(value: Any) -> Any:
    return msgspec.json.decode(as_json(value)) if isinstance(value, bytes | Tensors) else value
