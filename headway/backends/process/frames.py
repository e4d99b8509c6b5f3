"""Messages on the socket pair between a worker's parent and its child.

A frame consists of MAGIC, a length, and a message of that length as msgpack. MAGIC tells frames from bytes that user code wrote to
the descriptor by mistake. The child answers the parent's only Build with Ready or TargetRefused, and then each Run with Outputs or
Failed. It announces large Outputs with Computed. Messages name the places of large values in the arena (`arena.py`).
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from headway.core.arena import Place
from headway.model import MOST_OUTPUT, CostLine, PerCall, RowsTogether, TensorSpec, TokenCount, ValueKind

HEADER = struct.Struct(">4sQ")  # MAGIC and the number of bytes that follow.
MAGIC = b"HdwF"
MAX_FRAME = 1 << 30  # Limit on a frame, in bytes.
LONG = 64 << 10  # Size in bytes of a batch's parameters above which identical ones are sent only once.
MAX_OUTPUT = MOST_OUTPUT  # Limit on the output of one input, in bytes.
MAX_OUTPUTS = 192 << 20  # Limit per batch on requests' outputs, in characters or bytes. Inputs beyond it run again.
MAX_LARGE_OUTPUTS = 4 * MOST_OUTPUT  # The same for outputs of at least LONG_HAND_OVER bytes. The batch waits for them.
LARGE_BESIDE = MOST_OUTPUT // 2  # The same limit for a batch with several callers that also has smaller outputs.
LONG_HAND_OVER = 1 << 20  # Size in bytes from which the child announces a batch's outputs.
MAX_LINES_OUTPUTS = MOST_OUTPUT  # Limit per batch on bulk lines' outputs. Lines beyond it run again; one always fits.


class Build(msgspec.Struct, array_like=True, gc=False):
    """Message of the parent: load the target. `weight` names the weight function, or is empty. Modules are imported from
    `folder`, by default the working directory. If `whole`, each batch runs in one call, as far as `max_weight` allows."""

    arguments: str = ""
    folder: str = ""
    weight: str = ""
    max_weight: int = 0
    max_rows: int = 0
    whole: bool = False


class PlacedInput(msgspec.Struct, array_like=True, gc=False):
    """An input in the arena: its position in the batch, its kind, and its place."""

    position: int
    kind: ValueKind
    place: Place


class Run(msgspec.Struct, array_like=True, gc=False):
    """Message of the parent: run this batch.

    Attributes:
        inputs: each is a string or JSON, or a list: [bytes] for bytes, [bytes, true] for tensors. None for `placed` inputs.
        parameters: JSON for each input, or empty if it has no parameters; None if the target takes no parameters.
        used: how many bytes the inputs take at the beginning of the arena.
        which: index into `parameters` for each input, if identical parameters are sent only once.
        lines: number of bulk lines, which come last.
        mixed: True if the inputs come from several callers.
    """

    number: int
    inputs: list[Any]
    parameters: list[bytes] | None = None
    placed: list[PlacedInput] = []
    used: int = 0
    which: list[int] = []
    lines: int = 0
    mixed: bool = False

    def share_parameters(self) -> None:
        texts = self.parameters
        if texts is not None and sum(map(len, texts)) > LONG:
            places: dict[bytes, int] = {}
            self.which = [places.setdefault(text, len(places)) for text in texts]
            self.parameters = list(places)

    def parameters_of_each(self) -> list[bytes] | None:
        texts = self.parameters
        return [texts[place] for place in self.which] if texts is not None and self.which else texts


class Ready(msgspec.Struct, array_like=True, tag="ready", gc=False):
    """Message of the child: the target is loaded. Its example is JSON, or packed tensors if it takes tensors."""

    sees: PerCall
    source: str
    takes: ValueKind = ValueKind.TEXT
    gives: ValueKind = ValueKind.TEXT
    example: bytes | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    together: RowsTogether = RowsTogether.ANY
    per_call: PerCall = ()


class TargetRefused(msgspec.Struct, array_like=True, tag="refused", gc=False):
    """Message of the child: why the target can't be loaded, and the remedy. `trace` is user code's traceback, or empty."""

    message: str
    trace: str = ""


class Computed(msgspec.Struct, array_like=True, tag="computed", gc=False):
    """Message of the child: the run has ended, and Outputs of `size` bytes or characters follow."""

    size: int


class Outputs(msgspec.Struct, array_like=True, tag="outputs", gc=False):
    """Message of the child: one output per input.

    Attributes:
        outputs: each is a string, or bytes for all other kinds; None for a failed, placed or left-out output.
        errors: message and `fault` by position, as in `model.ItemResult`.
        weights: weights of the inputs if they are weighed, or 0 for an input that has none.
        unplaced: number of large outputs that didn't fit into the arena.
        keeps: True if user code kept a view of an input, so that the child can no longer use the arena.
        begun, ended: times of the run on the machine's monotonic clock.
        cost: new estimate of what calls cost, if it has changed.
        crowded: sizes of outputs that were left out because the batch's outputs were too large in total.
    """

    number: int
    kind: ValueKind
    outputs: list[Any]
    errors: dict[int, tuple[str, bool]]
    weights: list[int] = []
    placed: dict[int, Place] = {}
    unplaced: int = 0
    keeps: bool = False
    begun: float = 0.0
    ended: float = 0.0
    tokens: dict[int, TokenCount] = {}
    cost: CostLine | None = None
    crowded: dict[int, int] = {}

    @property
    def are_of_kind(self) -> bool:
        """True if all outputs are of `kind`. User code may have forged the message."""
        return {str if self.kind is ValueKind.TEXT else bytes, type(None)}.issuperset(map(type, self.outputs))


class Failed(msgspec.Struct, array_like=True, tag="failed", gc=False):
    """Message of the child: the batch failed; see also `Outputs`. User code raised or, if `bad_output`, didn't return a list
    of the right length. `places` has the inputs of the call that raised, or is empty for the whole batch."""

    number: int
    bad_output: bool
    message: str
    trace: str = ""
    places: list[int] = []
    keeps: bool = False
    begun: float = 0.0
    ended: float = 0.0


class NoFrame(Exception):
    """The data on the pipe isn't a frame."""


def header(content: bytes) -> bytes:
    """Return the header of a frame."""
    return HEADER.pack(MAGIC, len(content))


def framed(content: bytes) -> bytes:
    """Return a whole frame."""
    return header(content) + content


def unsent(content: bytes, sent: int) -> memoryview:
    """Return the part of a frame that is left once `sent` bytes were sent. `content` is the frame's message."""
    return memoryview(content)[sent - HEADER.size :] if sent >= HEADER.size else memoryview(framed(content))[sent:]


def length(head: bytes) -> int:
    """Return the length that a header announces. Raises NoFrame if it isn't a header, or the length exceeds MAX_FRAME."""
    magic, size = HEADER.unpack(head)
    if magic != MAGIC:
        raise NoFrame(f"{head!r} is not a frame header")
    if size > MAX_FRAME:
        raise NoFrame(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
    return int(size)
