"""The child process. It loads the target, and then runs one batch at a time until its pipe closes.

    python -P child.py WORKER FD PARENT KIND PLACE ATTRIBUTE

WORKER is only for the process table, FD is the child's end of the socket pair, and PARENT is the id of the parent process. The other
arguments name the target. A class's own arguments may be secret, so they are sent over the socket pair. The script is started by
path, so that no module in the working directory can shadow its imports. It imports little, to start in hundredths of a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic

if __name__ == "__main__":
    _home = __file__.removesuffix("headway/backends/process/child.py")
    sys.path.insert(0, _home)

import msgspec

from headway.backends.process import frames
from headway.backends.process.arena import Arena, place_outputs, receive, take_inputs
from headway.backends.process.frames import Build, Computed, Failed, Outputs, Ready, Run, TargetRefused
from headway.backends.process.run_batch import Weighing, bounded, run
from headway.backends.process.usercode import Refusal, Target, UserLoop, describe, load, trace
from headway.core.batch_cost import Calls
from headway.core.values import as_json
from headway.model import Tensors
from headway.runtime.memory_reuse import KEPT_BY_CHILD, reuse_large_blocks

if __name__ == "__main__":
    sys.path.remove(_home)

_READ = 1 << 16

_encode = msgspec.msgpack.Encoder().encode
_decode_run = msgspec.msgpack.Decoder(Run).decode


class Pipe:
    """The child's end of the socket pair, whose calls block. `arena` is the shared memory for large values."""

    def __init__(self, fd: int, arena: Arena | None = None) -> None:
        os.set_inheritable(fd, False)
        self.fd, self.arena = fd, arena
        self._rest = b""

    @property
    def holds(self) -> bool:
        return bool(self._rest)

    def receive(self) -> bytes | bytearray | None:
        """Return the content of the next frame, or None once the parent has closed its end."""
        header = self._take(frames.HEADER.size)
        if header is None:
            return None
        size = frames.length(header)
        return self._take(size) if size <= _READ else self._take_large(size)

    def _take(self, size: int) -> bytes | None:
        parts, have = [self._rest], len(self._rest)
        while have < size:
            part = os.read(self.fd, max(_READ, size - have))
            if not part:
                return None
            parts.append(part)
            have += len(part)
        whole = b"".join(parts)
        self._rest = whole[size:]
        return whole[:size]

    def _take_large(self, size: int) -> bytearray | None:
        whole = bytearray(size)
        have = min(len(self._rest), size)
        whole[:have] = self._rest[:have]
        self._rest = self._rest[have:]
        with memoryview(whole) as room:
            while have < size:
                count = os.readv(self.fd, [room[have:]])
                if not count:
                    return None
                have += count
        return whole

    def send(self, word: Ready | TargetRefused | Computed | Outputs | Failed) -> None:
        content = _encode(word)
        rest = frames.unsent(content, os.writev(self.fd, [frames.header(content), content]))
        while rest:
            rest = rest[os.write(self.fd, rest) :]


def attend(pipe: Pipe, loop: UserLoop, name: str, find: Callable[[Build, UserLoop], Target]) -> None:
    """Load the target that the parent names, and run batches until the pipe closes. `find` loads it, or raises Refusal."""
    if (content := pipe.receive()) is None:
        return
    try:
        build = msgspec.msgpack.decode(content, type=Build)
        target = find(build, loop)
        weighing = Weighing(target, build.weight, build.max_weight, loop) if build.weight else None
    except Refusal as refusal:
        pipe.send(TargetRefused(str(refusal), refusal.trace))
        return
    except BaseException as exc:
        pipe.send(TargetRefused(f"target {name}: inspecting it raised {describe(exc)}. Fix the target.", trace(exc)))
        return
    signature, example = target.signature, target.signature.example
    content = example.content if isinstance(example, Tensors) else None if example is None else as_json(example)
    pipe.send(
        Ready(
            signature.sees,
            target.source,
            signature.takes,
            signature.gives,
            content,
            signature.inputs,
            signature.outputs,
            signature.together,
            signature.per_call,
        )
    )
    serve(pipe, target, loop, weighing, build.max_rows, whole=build.whole)


def serve(
    pipe: Pipe,
    target: Target,
    loop: UserLoop,
    weighing: Weighing | None = None,
    most_rows: int = 0,
    *,
    whole: bool = False,
) -> None:
    """Run batches until the pipe closes, each in one call if `whole`."""
    calls = Calls(whole or target.one_call)
    while True:
        if not pipe.holds:
            loop.idle(pipe.fd)
        content = pipe.receive()
        if content is None:
            return
        batch, arena = _decode_run(content), pipe.arena
        take_inputs(arena, batch, target.takes_views)
        begun = monotonic()
        word = bounded(run(target, batch, weighing, most_rows, calls), batch.lines, mixed=batch.mixed)
        word.begun, word.ended = begun, monotonic()
        if not isinstance(word, Failed):
            word.cost = calls.news()
            if (size := sum(map(len, filter(None, word.outputs)))) >= frames.LONG_HAND_OVER:
                pipe.send(Computed(size))
            place_outputs(arena, batch, word)
        if (
            arena is not None and not arena.take_back()
        ):  # User code has kept a view, in which the next batch must not appear.
            word.keeps, pipe.arena = True, None
        pipe.send(word)
        del content, batch, word  # Otherwise they would stay in memory until the next batch arrives.


def leave_signals_to_parent() -> None:
    """Ignore the signals that a terminal or service manager sends to all processes at once, so that the parent
    can let running batches finish. The handler is an empty function, because processes started by user code would inherit
    SIG_IGN, and then these signals couldn't end them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        before = signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=partial(signal.signal, number, before))


def not_outlive(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, because hanging user code wouldn't notice."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main(arguments: list[str]) -> None:
    """Run as the child that `arguments` describe."""
    _, fd, parent, kind, place, attribute = arguments
    leave_signals_to_parent()
    faulthandler.enable()
    not_outlive(int(parent))
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.argv[:] = [place]

    def find(build: Build, loop: UserLoop) -> Target:
        return load(kind, place, attribute, loop, build.arguments, build.folder)

    arena = receive(int(fd))
    if arena is not None:
        reuse_large_blocks(KEPT_BY_CHILD)
    attend(Pipe(int(fd), arena), UserLoop(), f"{place}:{attribute}", find)


if __name__ == "__main__":
    main(sys.argv[1:])
