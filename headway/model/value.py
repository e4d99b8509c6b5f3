"""Values of inputs and outputs, and what a target says of those that it takes and gives."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Octets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Octets as a value: bytes that stand for themselves, and for no JSON."""

    content: bytes

    def __len__(self) -> int:
        """Return the number of octets."""
        return len(self.content)


class Tensors(Octets, frozen=True, array_like=True, gc=False):
    """Named arrays of numbers as a value, packed as `headway.core.tensors` packs them.

    `packed` is always true, and tells them from octets where only the members travel.
    """

    packed: bool = True


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Specification of one input or output of a model.

    Attributes:
        name: its name.
        datatype: datatype, as the Open Inference Protocol names it, for example `FP32`.
        shape: shape of one row, without the axis of the rows; -1 for an axis of any size.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] = ()


Value = str | bytes | Octets
"""Input or output of one entry. A text is itself; any other JSON value is its JSON text, in UTF-8; octets are Octets, and arrays
of numbers the Tensors among them. So a value needs no label: whoever holds one can show it."""


class TokenCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Count of the tokens that one input has used: `used` in all, of which `prompt` are of the input itself."""

    used: int
    prompt: int = 0


def added_up(each: Sequence[TokenCount | None]) -> TokenCount | None:
    """Return the tokens of all inputs together, as far as they were told; None where those of none were."""
    known = [one for one in each if one is not None]
    if len(known) < 2:
        return known[0] if known else None
    return TokenCount(sum(one.used for one in known), sum(one.prompt for one in known))


class Output(Generic[T]):
    """Output of a target for one input, with the tokens that it has used.

    Arguments:
        value: the output, as the target would return it by itself.
        tokens: tokens that the input has used in all, its own and those of the output.
        prompt_tokens: those of them that are the input's own.

    Raises:
        TypeError: a number of tokens is no whole number.
        ValueError: a number of tokens is below 0 or above MOST_TOKENS, or the input's own are more than all.
    """

    __slots__ = ("prompt_tokens", "tokens", "value")

    def __init__(self, value: T, tokens: int, prompt_tokens: int = 0) -> None:
        for name, count in (("tokens", tokens), ("prompt_tokens", prompt_tokens)):
            if type(count) is not int:
                kind = type(count).__name__
                raise TypeError(f"{name} is a {kind}, expected a whole number; make it one by int()")
            if not 0 <= count <= MOST_TOKENS:
                raise ValueError(f"{name} is {count}, expected a number from 0 to {MOST_TOKENS}")
        if prompt_tokens > tokens:
            raise ValueError(
                f"prompt_tokens is {prompt_tokens}, which is more than tokens, {tokens}: these are all together"
            )
        self.value, self.tokens, self.prompt_tokens = value, tokens, prompt_tokens


MOST_OUTPUT = 16 << 20
"""Most bytes of one output, as it travels."""
MOST_TOKENS = (1 << 31) - 1
"""Most tokens of one input, as a database's column holds them."""


class ValueKind(enum.Enum):
    """Kinds of values that a target takes or gives."""

    TEXT = "text"
    """Texts."""
    JSON = "json"
    """Any JSON values, texts among them."""
    BYTES = "bytes"
    """Octets; as a text they are in base64."""
    TENSORS = "tensors"
    """Arrays of numbers, each with a name, a datatype and a shape."""


class KindFacts(NamedTuple):
    """Facts of a kind of values, by which every part goes that carries values.

    Attributes:
        kind: the kind.
        type: Python's type of its values.
        letter: its letter where values are stored apart.
        noun: its values in words.
    """

    kind: ValueKind
    type: type[str] | type[bytes] | type[Octets]
    letter: str
    noun: str

    def of(self, content: bytes) -> Value:
        """Return the value whose content was stored as these bytes."""
        if self.type is str:
            return content.decode("utf-8", "surrogatepass")
        return content if self.type is bytes else self.type(content)


KINDS = (
    KindFacts(ValueKind.TENSORS, Tensors, "n", "tensors"),
    KindFacts(ValueKind.JSON, bytes, "j", "JSON values"),
    KindFacts(ValueKind.BYTES, Octets, "o", "octets"),
    KindFacts(ValueKind.TEXT, str, "t", "texts"),
)
"""All kinds. While the workers of a model differ, as in a fleet that changes to another target, the first of theirs counts."""
KIND = {one.kind: one for one in KINDS}
KIND_OF_LETTER = {one.letter: one for one in KINDS}
_KIND_OF_TYPE = {one.type: one for one in KINDS}


def kind_of(value: Value) -> KindFacts:
    """Return the facts of the kind of a value."""
    return _KIND_OF_TYPE[type(value)]


class WeightLine(msgspec.Struct, frozen=True, array_like=True):
    """Line by which the weight of an input follows from its length: `fixed`, and `by_octet` for each octet of it."""

    fixed: float
    by_octet: float


class CostShape(enum.Enum):
    """Measure by which the run time of a call grows."""

    NUMBER = "number"
    WEIGHT = "weight"
    PADDED = "padded"


class CostLine(msgspec.Struct, frozen=True, array_like=True):
    """Run time of a call as a line.

    Attributes:
        shape: what it goes by.
        alpha: fixed part in seconds.
        beta: seconds for each input, unit of weight, or padded unit of weight.
        longest: mean weight of the heaviest input of a batch, over inputs: what a place was filled up to of late.
        error: mean error of its forecasts of late, relative to the run time.
    """

    shape: CostShape
    alpha: float
    beta: float
    longest: float = 1.0
    error: float = 0.0


class RowsTogether(enum.Enum):
    """Rows of tensors that a target takes in one call: any, those of one shape, or those that are filled up to one shape."""

    ANY = ""
    SHAPE = "shape"
    PADDED = "padded"


PerCall = tuple[str, ...] | Literal["all"]
"""Names of the parameters that a call has once, so that only requests ride together whose values of these are equal."""
ALL_PARAMETERS: Final = "all"


class Signature(msgspec.Struct, frozen=True):
    """Signature of a target, as its annotations and its attribute `example` tell.

    Attributes:
        takes: kind of its inputs.
        gives: kind of its outputs.
        example: its example of an input; None for none.
        weight: line by which its weight function follows from the length of an input, as far as known; None without one.
        cost: line by which the run time of a call follows from its inputs; None where that is their number, or not known yet.
        inputs, outputs: specifications of its tensors, where it takes or gives them; empty as long as they are not known.
        together: which rows of its tensors run in one call.
        sees: parameters of requests that it gets.
        per_call: parameters that a call has once.
    """

    takes: ValueKind = ValueKind.TEXT
    gives: ValueKind = ValueKind.TEXT
    example: Value | None = None
    weight: WeightLine | None = None
    cost: CostLine | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    together: RowsTogether = RowsTogether.ANY
    sees: PerCall = ALL_PARAMETERS
    per_call: PerCall = ()

    @property
    def warm_up_input(self) -> Value | None:
        """Input of the batch that the target must pass before it gets real ones; None when none is known to fit."""
        if self.example is None and self.takes is ValueKind.TEXT:
            return WARM_UP
        return self.example


WARM_UP = "warm-up"
"""Warm-up input of a target that takes any text. Later probes of the target run it again."""
