"""Backend of a target under test, which notes the inputs of each batch, and a child in a thread of this process for it.

User code is called in the thread as in a child process, and its outputs are judged by the same code, so that what is checked
there is checked here. But it shares this process: objects that no other process could import can be run, seen and replaced by
a test, and nothing can end what hangs. Such a thread is left behind, and another takes its place.
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
    """Child that runs in a thread.

    Arguments:
        call: function, class or other object that is the target.
        name: name of the target, for errors.
        arguments, environment: of no use here.
        worker: name of the worker.
        log, guard: of no use here: what the target prints goes where this process prints.
        arena_bytes: of no use here: all values are in this process.
    """

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
        self._asked: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._live, name=f"headway-{worker}", daemon=True).start()

    def catch_up(self) -> None:
        """Do nothing: such a thread stands still only when this one does."""

    def kill(self, verdict: str = "") -> None:
        """Give the thread up. It ends when its batch does."""
        self.hang_up()
        self._loop.call_soon(self._finish, verdict)

    def hang_up(self) -> None:
        """Have the thread end after its batch."""
        self.doomed = True
        self.gone.set()
        self._asked.put(None)

    def resident_bytes(self) -> int:
        """Return 0: the memory is that of this process."""
        return 0

    def _send(self, content: bytes) -> None:
        self._asked.put(content)

    def _live(self) -> None:
        """Serve as a child process does."""
        loop = UserLoop()

        def find(build: Build, loop: UserLoop) -> Target:
            return prepare(self._call, self._name, "", loop, build.arguments)

        try:
            attend(_Words(self._asked, self._tell), loop, self._name, find)
        finally:
            loop.close()
            self._soon(self._finish, "has ended")

    def _tell(self, content: bytes) -> None:
        self._soon(self._hear, _decode(content))

    def _soon(self, act: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
            self._loop.call_soon_threadsafe(act, *arguments)

    def _finish(self, cause: str) -> None:
        self.doomed = True
        self.cause = self.how = self.cause or cause
        self._over()


class _Words(Pipe):
    """Pipe of a thread: words come by a queue, and go as they would by a pipe.

    Unlike a process, an idle thread does not let the target's background tasks go on.
    """

    holds = True

    def __init__(self, asked: SimpleQueue[bytes | None], tell: Any) -> None:
        self.fd, self.arena = -1, None
        self._asked, self._tell = asked, tell

    def receive(self) -> bytes | None:
        """Return the next word; None when the backend has hung up."""
        return self._asked.get()

    def send(self, word: Message | Computed) -> None:
        """Hand a word to the backend."""
        self._tell(_encode(word))


class ObservedBackend(ProcessBackend):
    """Backend that notes each batch, and runs it in a child process or in a thread of this one.

    Arguments:
        target: target; what is no module's and no file's runs in a thread.
        worker, device, start_timeout, log, guard, weights: see ProcessBackend.
    """

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
        """Note a batch, unless it is a probe, and run it."""
        if entries[0].gateway:
            self._batches.append([_built(entry.input) for entry in entries])
        return await super().run(entries, timeout)


def _built(value: Any) -> Any:
    """Return the input in Python's own form; what is no text travels as the text of JSON, and arrays are nested lists."""
    return msgspec.json.decode(as_json(value)) if isinstance(value, bytes | Tensors) else value
