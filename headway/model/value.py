"""Values of inputs and outputs, and what is known about those that a target takes and gives."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Octets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes that are a value themselves, and not its JSON text."""

    content: bytes

    def __len__(self) -> int:
        """Return the number of octets."""
        return len(self.content)


class Tensors(Octets, frozen=True, array_like=True, gc=False):
    """Named arrays of numbers, packed by `headway.core.tensors`.

    `packed` is always true. It distinguishes tensors from octets in formats that carry only the fields.
    """

    packed: bool = True


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Specification of one input or output of a model.

    Attributes:
        name: its name.
        datatype: its datatype in the Open Inference Protocol, for example `FP32`.
        shape: shape of one row, without the axis of rows; -1 for an axis of any size.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] = ()


Value = str | bytes | Octets
"""Input or output of one entry: a str is a text, bytes are the JSON text of any other JSON value in UTF-8, and Octets are binary
data or, as Tensors, arrays. The type tells the kind, so a value needs no label."""


class TokenCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Number of tokens that one input used: `used` in all, `prompt` for the input itself."""

    used: int
    prompt: int = 0


def added_up(counts: Sequence[TokenCount | None]) -> TokenCount | None:
    """Return the sum of the known counts; None if none is known."""
    known = [count for count in counts if count is not None]
    if len(known) < 2:
        return known[0] if known else None
    return TokenCount(sum(count.used for count in known), sum(count.prompt for count in known))


class Output(Generic[T]):
    """Output of a target for one input, with the tokens that it used.

    Arguments:
        value: the output, as the target would return it without tokens.
        tokens: all tokens used for this input, including those of the output.
        prompt_tokens: the part of `tokens` that is the input's own.

    Raises:
        TypeError: a number of tokens isn't a whole number.
        ValueError: a number of tokens is below 0 or above MOST_TOKENS, or `prompt_tokens` exceeds `tokens`.
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
"""Largest output in bytes, as it travels."""
MOST_TOKENS = (1 << 31) - 1
"""Largest number of tokens of one input, so that it fits a database column."""


class ValueKind(enum.Enum):
    """Kinds of values that a target takes or gives."""

    TEXT = "text"
    """Texts."""
    JSON = "json"
    """Any JSON values, including texts."""
    BYTES = "bytes"
    """Binary data, written in base64 where only text fits."""
    TENSORS = "tensors"
    """Arrays of numbers, each with a name, a datatype and a shape."""


class KindFacts(NamedTuple):
    """Facts about a kind of values, for all code that carries values.

    Attributes:
        kind: the kind.
        type: Python type of its values.
        letter: its letter where values are stored apart from entries.
        noun: name of its values in messages.
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
"""All kinds. If the workers of a model differ, as while a fleet changes to another target, the first of their kinds counts."""
KIND = {facts.kind: facts for facts in KINDS}
KIND_OF_LETTER = {facts.letter: facts for facts in KINDS}
_KIND_OF_TYPE = {facts.type: facts for facts in KINDS}


def kind_of(value: Value) -> KindFacts:
    """Return the facts of the kind of a value."""
    return _KIND_OF_TYPE[type(value)]


class WeightLine(msgspec.Struct, frozen=True, array_like=True):
    """Estimate of an input's weight from its length: `fixed`, plus `by_octet` for each octet."""

    fixed: float
    by_octet: float


class CostShape(enum.Enum):
    """Quantity with which the run time of a call grows."""

    NUMBER = "number"
    WEIGHT = "weight"
    PADDED = "padded"


class CostLine(msgspec.Struct, frozen=True, array_like=True):
    """Run time of a call as a linear function.

    Attributes:
        shape: what it grows with.
        alpha: fixed part in seconds.
        beta: seconds for each input, unit of weight, or padded unit of weight.
        longest: recent mean over inputs of the weight of their batch's heaviest input, to which each place is padded.
        error: recent mean error of its forecasts, relative to the run time.
    """

    shape: CostShape
    alpha: float
    beta: float
    longest: float = 1.0
    error: float = 0.0


class RowsTogether(enum.Enum):
    """Which rows of tensors may share a call: any, rows of one shape, or rows that can be padded to one shape."""

    ANY = ""
    SHAPE = "shape"
    PADDED = "padded"


PerCall = tuple[str, ...] | Literal["all"]
"""Names of the parameters that apply to a whole call; only requests with equal values share a batch. `all`: all parameters."""
ALL_PARAMETERS: Final = "all"


class Signature(msgspec.Struct, frozen=True):
    """Signature of a target, from its annotations and its attribute `example`.

    Attributes:
        takes: kind of its inputs.
        gives: kind of its outputs.
        example: its example input, if it has one.
        weight: estimate of its weight function, if it has one and something is known about it.
        cost: estimate of a call's run time; None if the number of inputs determines it, or if unknown.
        inputs, outputs: specifications of its tensors, if it takes or gives any and they are known.
        together: which rows of its tensors may share a call.
        sees: parameters of requests that it gets.
        per_call: parameters that apply to a whole call.
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
        """Input of the batch that the target must pass before it gets real ones; None if none is known to fit."""
        if self.example is None and self.takes is ValueKind.TEXT:
            return WARM_UP
        return self.example


WARM_UP = "warm-up"
"""Warm-up input of a target that takes any text; also used to probe it later."""
