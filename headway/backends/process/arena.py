"""Arena of a worker: memory that its process shares with its host, for large values.

The host makes it, unnamed, and sends its descriptor to the child once, over the socket pair. Its size is sealed, so the
child can't make the host touch memory that is gone. Pages come into being when first touched, and every later batch
uses them again. When both sides have closed it, or were killed, nothing is left.

`core.arena` places the values. Except on Linux there is no arena, and all values travel in frames.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from headway.core.arena import Place

if TYPE_CHECKING:
    import socket

LARGE = 1 << 15
"""Size in bytes from which a value travels in the arena. Below, a frame is as cheap."""
_GREETING = b"H"
"""First byte on the socket pair, which carries the descriptor if there is one."""
_DESCRIPTOR = 4
"""Size in bytes of a descriptor in a control message."""


class Arena:
    """Memory of one arena, as one side sees it.

    Arguments:
        memory: memory mapped by both sides.

    Attributes:
        size: bytes of it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        import ctypes  # `not_outlive` has loaded it.

        self.size = len(memory)
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._views: list[memoryview] = []
        self._lent: list[weakref.ref[Any]] = []

    def write(self, place: Place, *pieces: str | bytes | memoryview) -> None:
        """Write a value, in one or several pieces, to its place; texts must be ASCII."""
        at = place.offset
        for piece in pieces:
            end = at + len(piece)
            if isinstance(piece, str):
                _write_text(self._base + at, piece, len(piece))
            else:
                self._memory[at:end] = piece
            at = end

    def copy(self, place: Place) -> bytes:
        """Copy the value at a place. The other side may write there at any time, so only a copy can be checked."""
        return self._memory[place.offset : place.end]

    def text(self, place: Place) -> str:
        """Return the text at a place, if the other side can be trusted not to change it."""
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
        """End all views that were lent. Returns False if something made from one still exists."""
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
    """Make an arena and send its descriptor over the socket pair, before anything else.

    Returns None, and sends a greeting without a descriptor, if `size` is 0 or the system has no such memory. A child that is
    gone gets neither.
    """
    import _socket  # `socket` itself takes a child a while to import.

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
    """Return the arena whose descriptor comes first over the child's end of the socket pair; None if there is none."""
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


def _write_text(address: int, text: str, length: int) -> None:
    """Copy an ASCII text straight from its memory: encoding it first would take three times as long."""
    import ctypes

    ctypes.memmove(address, _finder()(text, None), length)


@cache
def _finder() -> Any:
    """Return a function that returns the address of a text's characters."""
    import ctypes

    find = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
    find.argtypes, find.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.c_void_p
    return find


def _make(size: int) -> tuple[int, mmap.mmap] | None:
    """Return the descriptor and mapping of unnamed, sealed memory; None if the system has none."""
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
