"""The child process: loads the target, then runs one batch at a time until its pipe closes.

    python -P child.py WORKER FD PARENT KIND PLACE ATTRIBUTE

WORKER is shown in the process table; FD is the child's end of the socket pair; PARENT the process it must
not outlive; the rest names the target. Arguments of a class may be secret, so they come by the socket pair. The child is
run by its path and imports little, so that it starts in a few hundredths of a second and nothing in the working directory
can shadow what it needs.

What user code returns must be a list or tuple with one output per input. Anything else fails the whole batch
and is never cut to fit. An exception instance, None, or what is no proper text in one place fails that input
alone. User code that raises, even SystemExit, fails its batch; the process goes on. What it returns is user code,
too, as its methods may be: to look at it may raise anything.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice

if __name__ == "__main__":
    _home = __file__.removesuffix("headway/backends/process/child.py")
    sys.path.insert(0, _home)

import msgspec

from headway.backends.process import frames
from headway.backends.process.frames import Answer, Build, Failed, Ready, Run, TargetRefused
from headway.backends.process.usercode import Refusal, Target, UserLoop, describe, kind_of, load, show, trace

if __name__ == "__main__":
    sys.path.remove(_home)

_READ = 1 << 16

_encode = msgspec.msgpack.Encoder().encode
_decode_run = msgspec.msgpack.Decoder(Run).decode


class Pipe:
    """The child's end of the socket pair, blocking."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.fd = fd
        self._rest = b""

    @property
    def holds(self) -> bool:
        """True when part of the next frame has been read already."""
        return bool(self._rest)

    def receive(self) -> bytes | None:
        """Content of the next frame; None when the parent has closed its end."""
        header = self._take(frames.HEADER.size)
        return None if header is None else self._take(frames.length(header))

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

    def send(self, word: Ready | TargetRefused | Answer | Failed) -> None:
        """Write one frame, all of it."""
        rest = memoryview(frames.framed(_encode(word)))
        while rest:
            rest = rest[os.write(self.fd, rest) :]


def run(target: Target, batch: Run) -> Answer | Failed:
    """Have user code run one batch, and judge what comes back."""
    expected = len(batch.inputs)
    try:
        return judge(batch.number, expected, target.run(batch.inputs, batch.parameters))
    except BaseException as exc:
        return Failed(batch.number, False, describe(exc), trace(exc))


def judge(number: int, expected: int, result: object) -> Answer | Failed:
    """Answer that `result` makes.

    Arguments:
        number: number of the batch.
        expected: number of its inputs.
        result: value that user code returned. Looking at it may raise anything.
    """
    if not isinstance(result, list | tuple):
        return Failed(number, True, f"the target returned {kind_of(result)}, expected a list of {expected} outputs")
    found = list(islice(result, expected + 1))  # It may have more than its length tells, and no end.
    count = len(found) if len(found) < expected else max(len(found), len(result))
    if count != expected:
        return Failed(number, True, f"the target returned {count} outputs for {expected} inputs")
    outputs: list[str | None] = []
    errors: dict[int, tuple[str, bool]] = {}
    size = 0
    for place, output in enumerate(found):
        if type(output) is str and output.isascii() and len(output) <= frames.MAX_OUTPUT:
            text: str | None = output
        else:
            text, error = _text(output)
            if text is None:
                errors[place] = error
        outputs.append(text)
        size += len(text or "")
    if size > frames.MAX_OUTPUTS:
        return Failed(number, True, f"the outputs come to {size} characters, the limit is {frames.MAX_OUTPUTS}")
    return Answer(number, outputs, errors)


def _text(output: object) -> tuple[str | None, tuple[str, bool]]:
    """`output` as plain text; or None, and the reason with whether the target is at fault."""
    try:
        if isinstance(output, BaseException):
            return None, (describe(output), False)
        if not isinstance(output, str):
            return None, (f"the target returned {kind_of(output)} for this input, expected str", True)
        size = len(str.encode(output))
    except UnicodeEncodeError:
        return None, ("the target returned a lone surrogate for this input, expected proper Unicode", True)
    except BaseException as exc:
        what = "the target returned something for this input that cannot be read"
        return None, (f"{what}: {describe(exc)}", True)
    if size > frames.MAX_OUTPUT:
        return None, (f"the target returned {size} bytes for this input, the limit is {frames.MAX_OUTPUT}", True)
    return str.__str__(output), ("", False)


def attend(pipe: Pipe, loop: UserLoop, name: str, find: Callable[[Build, UserLoop], Target]) -> None:
    """Load the target as the parent asks for it, and run batches until the pipe closes.

    Arguments:
        pipe: pipe to the parent.
        loop: finishes what is async.
        name: name of the target, for its author.
        find: loads the target; raises Refusal.
    """
    if (content := pipe.receive()) is None:
        return
    try:
        target = find(msgspec.msgpack.decode(content, type=Build), loop)
    except Refusal as refusal:
        pipe.send(TargetRefused(str(refusal)))
        return
    except BaseException as exc:
        show(exc)
        pipe.send(TargetRefused(f"target {name}: to look at it raised {describe(exc)}. Mend it there."))
        return
    pipe.send(Ready(target.takes_parameters, target.source))
    serve(pipe, target, loop)


def serve(pipe: Pipe, target: Target, loop: UserLoop) -> None:
    """Run batches until the pipe closes."""
    while True:
        if not pipe.holds:
            loop.idle(pipe.fd)
        content = pipe.receive()
        if content is None:
            return
        pipe.send(run(target, _decode_run(content)))


def leave_signals_to_parent() -> None:
    """Ignore interrupts, requests to end, and requests to read files again.

    A terminal or a service manager sends these signals to all processes at once. The parent decides, and may want
    batches in flight to finish. The handler does nothing; SIG_IGN would be inherited by what user code starts, which
    could then not be ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        before = signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=partial(signal.signal, number, before))


def not_outlive(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone. User code that hangs would not notice."""
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

    attend(Pipe(int(fd)), UserLoop(), f"{place}:{attribute}", find)


if __name__ == "__main__":
    main(sys.argv[1:])
