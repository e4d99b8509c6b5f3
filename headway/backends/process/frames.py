"""Words on the socket pair between a worker's parent and its child.

Both ends speak frames: MAGIC, the length of what follows, and one word as msgpack. To the parent's Build the child says
Ready or TargetRefused, once; then it answers each Run with Outputs or Failed, and says Computed before large Outputs. MAGIC tells a frame from what user code may
have written to the descriptor by mistake. Large values of a batch lie in the arena (`arena.py`), at places that the words give.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from headway.core.arena import Place
from headway.model import MOST_OUTPUT, CostLine, PerCall, RowsTogether, TensorSpec, TokenCount, ValueKind

HEADER = struct.Struct(">4sQ")
"""MAGIC and the number of bytes that follow."""
MAGIC = b"HdwF"
MAX_FRAME = 1 << 30
"""Limit on a frame, in bytes."""
LONG = 64 << 10
"""Size in bytes of a batch's parameters above which equal ones travel once."""
MAX_OUTPUT = MOST_OUTPUT
"""Limit on the output of one input, in bytes."""
MAX_OUTPUTS = 192 << 20
"""Limit on the outputs of all requests of a batch, in characters or bytes of JSON. Inputs beyond it run again, apart."""
MAX_LARGE_OUTPUTS = 4 * MOST_OUTPUT
"""Limit on their outputs of LONG_HAND_OVER and more together, as all of the batch waits for their transfer."""
LARGE_BESIDE = MOST_OUTPUT // 2
"""The same limit for a batch that also has smaller outputs, and several callers."""
LONG_HAND_OVER = 1 << 20
"""Size in bytes of a batch's outputs from which the child announces them before it hands them over."""
MAX_LINES_OUTPUTS = MOST_OUTPUT
"""Limit on the outputs of all bulk lines of a batch; one always fits. The others' sender runs them again, apart."""


class Build(msgspec.Struct, array_like=True, gc=False):
    """Message of the parent: load the target.

    `arguments` are those of its class, as `core.arguments` reads them; modules are imported from `folder`, where it is
    empty from the working directory. `weight` names its weight function, empty for none, and `max_weight` is most weight of
    a run; 0 for no bound. `max_rows` is most rows of a run of a target that takes tensors. `whole`: each batch is one call, as far as its
    weight allows.
    """

    arguments: str = ""
    folder: str = ""
    weight: str = ""
    max_weight: int = 0
    max_rows: int = 0
    whole: bool = False


class PlacedInput(msgspec.Struct, array_like=True, gc=False):
    """Input in the arena: its position in the batch, its kind there, and its place."""

    position: int
    kind: ValueKind
    place: Place


class Run(msgspec.Struct, array_like=True, gc=False):
    """Message of the parent: run this batch. `inputs` are values; `parameters` holds JSON texts, empty for none, if the target takes them.

    Octets are a list of their bytes alone, tensors one of their bytes and true. Where an input is in `placed`, `inputs` has None. All of these take the first `used` bytes of the arena.
    Long parameters that several inputs have travel once: `which` has the place of each input's in `parameters` then.
    The last `lines` inputs are bulk lines. `mixed`: the inputs are of several callers.
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
        """Let equal parameters travel once, if all of them are long."""
        texts = self.parameters
        if texts is not None and sum(map(len, texts)) > LONG:
            places: dict[bytes, int] = {}
            self.which = [places.setdefault(text, len(places)) for text in texts]
            self.parameters = list(places)

    def parameters_of_each(self) -> list[bytes] | None:
        """Return the parameters of each input."""
        texts = self.parameters
        return [texts[place] for place in self.which] if texts is not None and self.which else texts


class Ready(msgspec.Struct, array_like=True, tag="ready", gc=False):
    """Message of the child: the target is loaded.

    `source` is its file, empty when it has none; `example` a JSON text, or the content of packed tensors where it takes these;
    `inputs` and `outputs` are the specifications of its tensors; `together` tells which rows of them run in one call, and
    `sees` and `per_call` which parameters it gets, and which a call has once.
    """

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
    """Message of the child: the target can't be loaded. Says why, and how to fix it.

    `trace` is the traceback of what user code raised, empty if it did not.
    """

    message: str
    trace: str = ""


class Computed(msgspec.Struct, array_like=True, tag="computed", gc=False):
    """Message of the child: the batch ran, and Outputs of `size` bytes or characters follow. Their transfer isn't part of the run."""

    size: int


class Outputs(msgspec.Struct, array_like=True, tag="outputs", gc=False):
    """Message of the child: one output per input, as `kind` has it: a text, a JSON text in bytes, octets, or the content of packed tensors.

    Where it is None, `errors` has (text, fault), see `model.ItemResult`. `weights` are those of the inputs, where they are weighed; 0
    for one that cannot be. Where an output is in `placed`, it lies in the arena, and `outputs` has None. For `unplaced` large
    ones there was no room. `keeps` says that user code has kept a view of an input, so that the arena is the child's own from
    now on. `begun` and `ended` are the instants, on the machine's monotonic clock, between which the batch ran. `tokens` are
    those that inputs have used, of which the target tells. `cost` tells what calls cost, when that is news. `crowded` has the
    positions and sizes of those whose outputs were left out, as those of the batch are too large together.
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
        """True if all outputs are of `kind`. User code may have written the message."""
        return {str if self.kind is ValueKind.TEXT else bytes, type(None)}.issuperset(map(type, self.outputs))


class Failed(msgspec.Struct, array_like=True, tag="failed", gc=False):
    """Message of the child: the batch failed. User code raised, or (`bad_output`) returned no list of that length.

    `trace` is the traceback of what user code raised; `keeps`, `begun` and `ended` are as in Outputs. `places` are those of
    the inputs of the call that raised; empty where that had all of the batch.
    """

    number: int
    bad_output: bool
    message: str
    trace: str = ""
    places: list[int] = []
    keeps: bool = False
    begun: float = 0.0
    ended: float = 0.0


class NoFrame(Exception):
    """The pipe carries something that isn't a frame."""


def header(content: bytes) -> bytes:
    """Return the header of the frame with this content."""
    return HEADER.pack(MAGIC, len(content))


def framed(content: bytes) -> bytes:
    """Return `content` as one frame."""
    return header(content) + content


def unsent(content: bytes, sent: int) -> memoryview:
    """Return the rest of the frame with this content after so many bytes."""
    return memoryview(content)[sent - HEADER.size :] if sent >= HEADER.size else memoryview(framed(content))[sent:]


def length(head: bytes) -> int:
    """Return the bytes that follow a header.

    Raises:
        NoFrame: the bytes aren't a header, or announce more than MAX_FRAME.
    """
    magic, size = HEADER.unpack(head)
    if magic != MAGIC:
        raise NoFrame(f"{head!r} is no header of a frame")
    if size > MAX_FRAME:
        raise NoFrame(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
    return int(size)
