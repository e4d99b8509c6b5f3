"""A child process, from spawning to reaping. `backend` kills it at the GPU deadline.

    spawned ──kill(), or it dies──▶ ended (reaped, all descriptors closed)

A child can fail at any moment: the kernel reports its end (pidfd), its pipe closes, or it sends a malformed message. In the last two
cases, its process group is killed. So every child ends in `_exited`, which reaps it, reads its last output, and wakes all waiters.
Everything here runs in callbacks of one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

import msgspec

from headway.backends.process import frames
from headway.backends.process.arena import Arena, hand_over
from headway.backends.process.frames import Computed, Failed, NoFrame, Outputs, Ready, TargetRefused
from headway.backends.process.group_guard import GroupGuard
from headway.backends.process.output_lines import Lines
from headway.runtime.log import OUTPUT

Message = Ready | TargetRefused | Outputs | Failed

_CHILD = Path(__file__).with_name("child.py")
_READ = 1 << 16
_IN_FLIGHT = 1 << 20  # Bytes that each end may send before the other reads them. The system may allow fewer.
_LAST_WORDS = 5
_PIPELESS = 1.0  # Seconds that a child may live after its pipe closed, because a dying child may still print why.
_DROPPED_AFTER = 1.0  # Seconds from a flood of output to the log line that counts the dropped lines.

_NOTHING = memoryview(b"")

_decode: Any = msgspec.msgpack.Decoder(Message | Computed).decode


class Log(Protocol):
    """The methods of a structlog logger that are used here."""

    def info(self, event: str, **fields: Any) -> Any: ...

    def warning(self, event: str, **fields: Any) -> Any: ...


class Output:
    """An output stream of a child, `stdout` or `stderr`, which is written to the log."""

    def __init__(self, pipe: IO[bytes], stream: str, worker: str, log: Log) -> None:
        self.lines = Lines()
        self._pipe, self._fd = pipe, pipe.fileno()
        self._stream, self._worker, self._log = stream, worker, log
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self.read)

    def read(self) -> bool:
        """Log one chunk of output. Return False if there was none."""
        try:
            chunk = os.read(self._fd, _READ)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._fd)
            return False
        self._say(self.lines.feed(chunk, self._loop.time()))
        if self.lines.dropped and self._timer is None:
            self._timer = self._loop.call_later(_DROPPED_AFTER, self._tell_dropped)
        return True

    def close(self) -> None:
        chunks = 0
        while self.read() and chunks < 16:
            chunks += 1
        self._say(self.lines.finish())
        self._tell_dropped()
        self._loop.remove_reader(self._fd)
        self._pipe.close()

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._log.info(OUTPUT, worker=self._worker, stream=self._stream, line=line)

    def _tell_dropped(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if dropped := self.lines.take_dropped():
            self._log.warning("worker output dropped", worker=self._worker, stream=self._stream, lines=dropped)


class Child(ABC):
    """A running child, as used by its backend. Create it on the event loop, in a thread that outlives the child."""

    def __init__(self, worker: str) -> None:
        self.pid = 0
        self.cause = ""  # Why the child ended, or "" while it lives.
        self.how = ""  # Why the child ended, and its last output, which may come from an earlier batch.
        self.ended = asyncio.Event()  # Set once the child has been reaped.
        self.gone = asyncio.Event()  # Set once the child must be replaced: it has ended or is unusable.
        self.doomed = False  # True if the child has ended, or is about to.
        self.dismissed = False  # True if the child's end is intended.
        self.killed_by_others = False  # True if a SIGKILL from another process ended the child.
        self.arena: Arena | None = None
        self.handing_over = 0  # Bytes of large outputs that the child is handing over, or 0.
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._waiter: asyncio.Future[Message] | None = None

    def ask(self, content: bytes) -> asyncio.Future[Message]:
        """Send a frame. Return a future of the child's next message; it raises ChildProcessError if the child ends first."""
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError(f"worker {self._worker} was sent a request before it answered the previous one")
        waiter: asyncio.Future[Message] = self._loop.create_future()
        self.handing_over = 0
        if self.how:
            waiter.set_exception(ChildProcessError(self.how))
        else:
            self._waiter = waiter
            self._send(content)
        return waiter

    @abstractmethod
    def catch_up(self) -> None:
        """Read everything that the child has sent so far, in case this process was held up."""

    @abstractmethod
    def kill(self, verdict: str = "") -> None:
        """Kill the child and all its descendants. `verdict` replaces the signal as the reported cause."""

    @abstractmethod
    def hang_up(self) -> None:
        """Close the pipe, which asks an idle child to end."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Return the child's resident memory in bytes, or 0 if unknown."""

    @abstractmethod
    def _send(self, content: bytes) -> None: ...

    def _hear(self, word: Message | Computed) -> None:
        if isinstance(word, Computed):
            self.handing_over = min(max(word.size, 1), frames.MAX_FRAME)
            return
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(word)

    def _over(self) -> None:
        """Wake all waiters. `how` must be set before."""
        # The exception references the waiting frames, and they reference this object, so drop the waiter.
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(ChildProcessError(self.how))
        self.gone.set()
        self.ended.set()


class ChildProcess(Child):
    """A child in a separate process. `arguments` are KIND PLACE ATTRIBUTE, as in `child.py`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        worker: str,
        log: Log,
        guard: GroupGuard | None = None,
        arena_bytes: int = 0,
    ) -> None:
        super().__init__(worker)
        self._log, self._guard = log, guard
        self._verdict = ""
        self._pipeless: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._nonsense = False  # True once the child has sent a malformed message. Later messages are ignored.
        self._unsent = _NOTHING
        self._process, self._socket = _spawn(arguments, environment, worker)
        self.pid = self._process.pid
        if guard is not None:
            guard.watch(self.pid)
        try:
            self.arena = hand_over(arena_bytes, self._socket)
            out, err = cast(IO[bytes], self._process.stdout), cast(IO[bytes], self._process.stderr)
            self._outputs = [Output(out, "stdout", worker, log), Output(err, "stderr", worker, log)]
            self._loop.add_reader(self._socket, self._readable)
            self._pidfd = self._watch()
        except BaseException:
            self.kill()
            if guard is not None:
                guard.forget(self.pid)
            self._process.wait()
            raise

    def catch_up(self) -> None:
        while self.how == "" and self._readable():
            pass

    def kill(self, verdict: str = "") -> None:
        self.doomed = True
        self.gone.set()
        if self.how or self._process.returncode is not None:
            return
        self._verdict = self._verdict or verdict
        # A process keeps its id until it is reaped, so this can't hit another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        self.doomed = True
        if not self.how:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def resident_bytes(self) -> int:
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _watch(self) -> int | None:
        """Arrange for `_exited` to be called at the end of the process. Return its pidfd, or None if the system has none."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):

            def wait() -> None:
                self._process.wait()
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._exited)

            threading.Thread(target=wait, name=f"wait-{self._worker}", daemon=True).start()
            return None
        self._loop.add_reader(pidfd, self._exited)
        return pidfd

    def _send(self, content: bytes) -> None:
        try:
            sent = self._socket.sendmsg([frames.header(content), content])
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose_pipe()
            return
        if sent < frames.HEADER.size + len(content):
            self._unsent = frames.unsent(content, sent)
            self._loop.add_writer(self._socket, self._send_on)

    def _send_on(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose_pipe()
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:] or _NOTHING  # An empty view would keep its whole buffer alive.
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _lose_pipe(self) -> None:
        self._loop.remove_reader(self._socket)
        self.doomed = True
        self.gone.set()
        if self._pipeless is None:
            self._pipeless = self._loop.call_later(_PIPELESS, self.kill, "closed its pipe to Headway")

    def _readable(self) -> bool:
        if self._nonsense:
            return False
        try:
            chunk = self._socket.recv(_IN_FLIGHT if len(self._received) >= _READ else _READ)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self._lose_pipe()
            return False
        self._received += chunk
        try:
            self._take_words()
        except (NoFrame, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._nonsense = True
            self._received.clear()
            self._loop.remove_reader(self._socket)
            self.kill("wrote something on its pipe to Headway that is not an answer")
            return False
        return True

    def _take_words(self) -> None:
        header = frames.HEADER.size
        while len(self._received) >= header:
            end = header + frames.length(bytes(self._received[:header]))
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                word: Message | Computed = _decode(view[header:end])
            del self._received[:end]
            if self._waiter is None or self._waiter.done():
                raise NoFrame("a message that was not requested")
            self._hear(word)

    def _exited(self) -> None:
        """Clean up after the process: reap it, read its last output, close everything, and wake all waiters."""
        if self._pidfd is not None:
            self.kill()  # Its descendants may still run.
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._guard is not None:
            self._guard.forget(self.pid)
        code = self._process.wait()
        while self._readable():
            pass
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self.arena = None  # A reader that is still copying an output has its own reference.
        for output in self._outputs:
            output.close()
        if self._pipeless is not None:
            self._pipeless.cancel()
        killed = code == -signal.SIGKILL
        self.killed_by_others = killed and not self._verdict
        self.cause = self._verdict if self._verdict and killed else _cause(code)
        words = [] if self.dismissed else self._outputs[1].lines.last_words(_LAST_WORDS)
        self.how, self.doomed = self.cause + (f"; its last words: {' | '.join(words)}" if words else ""), True
        say = self._log.info if self.dismissed else self._log.warning
        say("worker process ended", worker=self._worker, pid=self.pid, how=self.how)
        self._over()


def _spawn(
    arguments: Sequence[str], environment: Mapping[str, str], worker: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_FLIGHT)
    with theirs:
        ours.setblocking(False)
        own = [worker, str(theirs.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), *own, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
