"""A worker's arena: memory for large values, which the worker's process shares with its host.

The host creates anonymous memory, and sends its descriptor to the child over the socket pair. The size is sealed, so the child can't
shrink memory that the host is using. Pages are allocated on first use, and reused by later batches. The memory is freed once both
sides have closed the arena or have ended.

`core.arena` chooses the places. The sender of inputs or outputs puts large values there, and the receiver takes them out. The host
copies in steps, between which its event loop can run. Only Linux has arenas; on other systems, all values are sent in frames.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from headway.backends.process.frames import NoFrame, Outputs, PlacedInput, Run
from headway.core.arena import Allocator, Place, sound
from headway.model import KIND, Octets, Tensors, ValueKind, kind_of

if TYPE_CHECKING:
    import socket

LARGE = 1 << 15  # Size in bytes from which a value is put into the arena. For smaller values, a frame is just as cheap.
_GREETING = b"H"  # First byte on the socket pair. The descriptor, if any, is sent along with it.
_DESCRIPTOR = 4  # Size in bytes of a descriptor in a control message.

Count = Callable[[str, bool], None]  # Counts a large value: `in` or `out`, and True if it went through the arena.


class Arena:
    """An arena, as mapped by one side. `size` is its length in bytes."""

    def __init__(self, memory: mmap.mmap) -> None:
        import ctypes  # `not_outlive` has loaded it.

        self.size = len(memory)
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._views: list[memoryview] = []
        self._lent: list[weakref.ref[Any]] = []

    def write(self, place: Place, *pieces: str | bytes | memoryview) -> None:
        """Write a value, in one or several pieces, to its place. Strings must be ASCII."""
        import ctypes

        at = place.offset
        for piece in pieces:
            end = at + len(piece)
            if isinstance(piece, str):
                # Encoding an ASCII string first would take three times as long as copying it from its memory.
                ctypes.memmove(self._base + at, _finder()(piece, None), len(piece))
            else:
                self._memory[at:end] = piece
            at = end

    def copy(self, place: Place) -> bytes:
        """Return a copy of the value at a place. Check only the copy: the other side can change the original at any time."""
        return self._memory[place.offset : place.end]

    def text(self, place: Place) -> str:
        """Return the string at a place. Call this only if the other side can be trusted not to change it."""
        with memoryview(self._memory) as whole, whole[place.offset : place.end] as view:
            return str(view, "utf-8")

    def lend(self, place: Place) -> memoryview:
        """Return a read-only view of a place for user code, valid until `take_back`."""
        import ctypes

        lent = (ctypes.c_char * place.length).from_buffer(self._memory, place.offset)
        self._lent.append(weakref.ref(lent))
        view = memoryview(lent).cast("B").toreadonly()
        self._views.append(view)
        return view

    def take_back(self) -> bool:
        """Release all lent views. Return False if an object made from a view still exists."""
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        self._views.clear()
        kept = self._kept()
        if kept:
            gc.collect()
            kept = self._kept()
        self._lent.clear()
        return not kept

    def _kept(self) -> bool:
        return any(lent() is not None for lent in self._lent)


def hand_over(size: int, end: socket.socket) -> Arena | None:
    """Create an arena, and send its descriptor as the first thing on the socket pair. Return None if `size` is 0, the
    system lacks such memory, or the child is gone. A child without an arena is told so."""
    import _socket  # Importing `socket` would slow down the start of a child.

    made = _make(size) if size else None
    try:
        if made is None:
            end.send(_GREETING)
            return None
        rights = made[0].to_bytes(_DESCRIPTOR, sys.byteorder)
        end.sendmsg([_GREETING], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        return Arena(made[1])
    except OSError:
        return None
    finally:
        if made is not None:
            os.close(made[0])


def receive(end: int) -> Arena | None:
    """Receive the arena's descriptor at the child's end of the socket pair. Return None if there is no arena."""
    import _socket

    pair = _socket.socket(fileno=end)
    try:
        _, control, _, _ = pair.recvmsg(len(_GREETING), _socket.CMSG_SPACE(_DESCRIPTOR), _socket.MSG_CMSG_CLOEXEC)
    finally:
        pair.detach()
    descriptors = [
        int.from_bytes(data[:_DESCRIPTOR], sys.byteorder) for _, kind, data in control if kind == _socket.SCM_RIGHTS
    ]
    if not descriptors:
        return None
    [fd] = descriptors
    try:
        return Arena(mmap.mmap(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)


@cache
def _finder() -> Any:
    """Return a function that returns the address of a string's characters."""
    import ctypes

    find = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
    find.argtypes, find.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.c_void_p
    return find


def _make(size: int) -> tuple[int, mmap.mmap] | None:
    """Create anonymous, sealed memory. Return its descriptor and mapping, or None if the system has no such memory."""
    import fcntl

    try:
        fd = os.memfd_create("headway-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(fd, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd, mmap.mmap(fd, size)
    except OSError:
        os.close(fd)
        return None


class Pieces:
    """Packed tensors that a target returned, as views of its arrays, so that the data is copied only once."""

    __slots__ = ("_size", "are_large", "pieces")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))
        self.are_large = self._size >= LARGE

    def __len__(self) -> int:
        return self._size

    def joined(self) -> bytes:
        return b"".join(self.pieces)


def place_inputs(arena: Arena, run: Run, count: Count) -> Iterator[int]:
    """Move a batch's large inputs into the arena while there is room. Yield the size of each. Raises UnicodeEncodeError."""
    allocator = Allocator(arena.size, run.number)
    inputs = run.inputs
    for position, value in enumerate(inputs):
        if value is None or len(value) < LARGE:
            continue
        content, kind = _content(value)
        place = allocator.take(len(content))
        count("in", place is not None)
        if place is not None:
            arena.write(place, content)
            run.placed.append(PlacedInput(position, kind, place))
            inputs[position] = None
            run.used = allocator.used
            yield len(content)


def take_inputs(arena: Arena | None, run: Run, lend: bool) -> None:
    """Turn a batch's inputs, from the frame and the arena, into values. If `lend`, bytes in the arena become views."""
    inputs = run.inputs
    if list in map(type, inputs):
        inputs[:] = [(Tensors if len(item) > 1 else Octets)(item[0]) if type(item) is list else item for item in inputs]
    if arena is None:
        return
    for placed in run.placed:
        if placed.kind is ValueKind.TEXT:
            inputs[placed.position] = arena.text(placed.place)
        elif placed.kind is ValueKind.TENSORS or (lend and placed.kind is ValueKind.BYTES):
            inputs[placed.position] = KIND[placed.kind].type(arena.lend(placed.place))  # type: ignore[arg-type]
        else:
            inputs[placed.position] = KIND[placed.kind].of(arena.copy(placed.place))


def place_outputs(arena: Arena | None, run: Run, word: Outputs) -> None:
    """Move a batch's large outputs into the arena while there is room after the inputs."""
    outputs = word.outputs
    if arena is None:
        if word.kind is ValueKind.TENSORS:
            outputs[:] = [value.joined() if type(value) is Pieces else value for value in outputs]
        return
    allocator = Allocator(arena.size, run.number, run.used)
    for position, value in enumerate(outputs):
        if value is None or len(value) < LARGE:
            continue
        pieces = value.pieces if type(value) is Pieces else (_content(value)[0],)
        place = allocator.take(sum(map(len, pieces)))
        if place is not None:
            arena.write(place, *pieces)
            word.placed[position] = place
            outputs[position] = None
        else:
            word.unplaced += 1
            if type(value) is Pieces:
                outputs[position] = value.joined()


def take_outputs(arena: Arena | None, run: Run, word: Outputs, count: Count) -> Iterator[int]:
    """Copy the outputs in the arena into the batch's list of outputs. Yield the size after each copy and each check.

    The child isn't trusted. If it names an impossible place, raise NoFrame. It may still be writing to the arena, so only
    the copy is checked."""
    outputs = word.outputs
    if len(word.placed) > len(outputs):
        raise NoFrame("more places than outputs")
    if arena is None or not sound(word.placed.values(), arena.size, run.number, run.used):
        raise NoFrame("an impossible place")
    for position, place in word.placed.items():
        if not 0 <= position < len(outputs) or outputs[position] is not None:
            raise NoFrame("a place for an output that is already there")
        content = arena.copy(place)
        yield len(content)
        try:
            outputs[position] = content.decode() if word.kind is ValueKind.TEXT else content
        except UnicodeDecodeError:
            raise NoFrame("a string that is not UTF-8") from None
        count("out", True)
        yield len(content)
    for _ in range(min(word.unplaced, len(outputs))):
        count("out", False)


def _content(value: str | bytes | Octets) -> tuple[str | bytes, ValueKind]:
    """Return the content of a value for the arena, and its kind. An ASCII string stays a string."""
    kind = kind_of(value).kind
    if isinstance(value, str):
        return value if value.isascii() else value.encode(), kind
    return value if isinstance(value, bytes) else value.content, kind
