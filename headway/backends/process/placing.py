"""Large values in the arena: the side that sends a batch or its outputs places them, the other takes them out.

The host copies in steps, each of which reports its bytes, so that its event loop can run between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headway.backends.process.arena import LARGE, Arena
from headway.backends.process.frames import NoFrame, Outputs, PlacedInput, Run
from headway.core.arena import Allocator, sound
from headway.model import KIND, Octets, Tensors, ValueKind, kind_of

Count = Callable[[str, bool], None]
"""Function that counts a large value: its direction, `in` or `out`, and whether it went through the arena."""


class Pieces:
    """Packed tensors that a target returned, as views of its arrays, so that they are copied only once, to where they travel.

    Arguments:
        pieces: pieces in order.

    Attributes:
        are_large: whether they belong in the arena.
    """

    __slots__ = ("_size", "are_large", "pieces")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))
        self.are_large = self._size >= LARGE

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._size

    def joined(self) -> bytes:
        """Return a copy of all pieces in one."""
        return b"".join(self.pieces)


def place_inputs(arena: Arena, run: Run, count: Count) -> Iterator[int]:
    """Move large inputs of a batch into the arena while there is room; one in each step.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
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
    """Turn a batch's inputs into values, those in the arena too. With `lend`, octets in the arena become views rather than copies."""
    inputs = run.inputs
    if list in map(type, inputs):
        inputs[:] = [(Tensors if len(one) > 1 else Octets)(one[0]) if type(one) is list else one for one in inputs]
    if arena is None:
        return
    for one in run.placed:
        if one.kind is ValueKind.TEXT:
            inputs[one.position] = arena.text(one.place)
        elif one.kind is ValueKind.TENSORS or (lend and one.kind is ValueKind.BYTES):
            inputs[one.position] = KIND[one.kind].type(arena.lend(one.place))  # type: ignore[arg-type]
        else:
            inputs[one.position] = KIND[one.kind].of(arena.copy(one.place))


def place_outputs(arena: Arena | None, run: Run, word: Outputs) -> None:
    """Move large outputs of a batch into the arena, if there is one, while there is room behind the inputs."""
    outputs = word.outputs
    if arena is None:
        if word.kind is ValueKind.TENSORS:
            outputs[:] = [one.joined() if type(one) is Pieces else one for one in outputs]
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
    """Copy the outputs that are in the arena into the batch's list of outputs. Each is copied in one step, and read in the next.

    The child can't be trusted: it may have named impossible places, and may still be writing there. A copy
    can't change any more, so that is what is checked.

    Raises:
        NoFrame: an output's place is impossible, or doesn't hold a text.
    """
    outputs = word.outputs
    if len(word.placed) > len(outputs):
        raise NoFrame("more places than outputs")
    if arena is None or not sound(word.placed.values(), arena.size, run.number, run.used):
        raise NoFrame("a place that cannot be")
    for position, place in word.placed.items():
        if not 0 <= position < len(outputs) or outputs[position] is not None:
            raise NoFrame("a place for what is there already")
        content = arena.copy(place)
        yield len(content)
        try:
            outputs[position] = content.decode() if word.kind is ValueKind.TEXT else content
        except UnicodeDecodeError:
            raise NoFrame("a text that is none") from None
        count("out", True)
        yield len(content)
    for _ in range(min(word.unplaced, len(outputs))):
        count("out", False)


def _content(value: str | bytes | Octets) -> tuple[str | bytes, ValueKind]:
    """Return a value as it goes into the arena, and its kind. An ASCII text stays one, to be encoded piece by piece."""
    kind = kind_of(value).kind
    if isinstance(value, str):
        return value if value.isascii() else value.encode(), kind
    return value if isinstance(value, bytes) else value.content, kind
