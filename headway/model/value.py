"""Values of inputs and outputs, and facts about the values that a target accepts and returns."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Octets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value that is binary data. (Plain `bytes` are a JSON-encoded value.)"""

    content: bytes

    def __len__(self) -> int:
        return len(self.content)


class Tensors(Octets, frozen=True, array_like=True, gc=False):
    """Named numeric arrays, packed by `headway.core.tensors`. `packed` distinguishes them from octets on the wire."""

    packed: bool = True


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Specification of one input or output of a model."""

    name: str
    datatype: str  # Data type in the Open Inference Protocol, for example `FP32`.
    shape: tuple[int, ...] = ()  # Shape of one row, without the row axis. -1 for an axis of variable size.


# Input or output of an entry: a JSON string (str), another JSON value in UTF-8 (bytes), binary data (Octets), or arrays (Tensors).
Value = str | bytes | Octets


class TokenCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Number of tokens used for one input. `prompt` is the part for the input itself."""

    used: int
    prompt: int = 0


def added_up(counts: Sequence[TokenCount | None]) -> TokenCount | None:
    """Return the sum of the known counts, or None if none is known."""
    known = [count for count in counts if count is not None]
    if len(known) < 2:
        return known[0] if known else None
    return TokenCount(sum(count.used for count in known), sum(count.prompt for count in known))


class Output(Generic[T]):
    """A target's output for one input, with the number of tokens used.

    Arguments:
        value: the output, as the target would return it if it didn't report tokens.
        tokens: number of tokens used for this input in total, including those of the output.
        prompt_tokens: number of tokens in the input itself. They are included in `tokens`.

    Raises:
        TypeError: a number of tokens isn't an int.
        ValueError: a number of tokens is below 0 or above MOST_TOKENS, or `prompt_tokens` exceeds `tokens`."""

    __slots__ = ("prompt_tokens", "tokens", "value")

    def __init__(self, value: T, tokens: int, prompt_tokens: int = 0) -> None:
        for name, count in (("tokens", tokens), ("prompt_tokens", prompt_tokens)):
            if type(count) is not int:
                kind = type(count).__name__
                raise TypeError(f"{name} is a {kind}, expected a whole number; convert it with int()")
            if not 0 <= count <= MOST_TOKENS:
                raise ValueError(f"{name} is {count}, expected a number from 0 to {MOST_TOKENS}")
        if prompt_tokens > tokens:
            raise ValueError(f"prompt_tokens is {prompt_tokens}, but tokens, which includes them, is only {tokens}")
        self.value, self.tokens, self.prompt_tokens = value, tokens, prompt_tokens


MOST_OUTPUT = 16 << 20  # Maximum bytes of an encoded output.
MOST_TOKENS = (1 << 31) - 1  # Maximum number of tokens for one input, so that it fits into a database column.


class ValueKind(enum.Enum):
    """Kinds of values that a target accepts or returns."""

    TEXT = "text"
    JSON = "json"  # Any JSON values, including strings.
    BYTES = "bytes"  # Binary data, encoded in base64 where only text is possible.
    TENSORS = "tensors"  # Numeric arrays, each with a name, a data type and a shape.


class KindFacts(NamedTuple):
    """Facts about a kind of values."""

    kind: ValueKind
    type: type[str] | type[bytes] | type[Octets]
    letter: str  # Name of the kind where values are stored separately from entries.
    noun: str  # What messages call the values.

    def of(self, content: bytes) -> Value:
        """Return the value that is stored as `content`."""
        if self.type is str:
            return content.decode("utf-8", "surrogatepass")
        return content if self.type is bytes else self.type(content)


# If a model's workers differ in kind while the fleet changes to another target, the first of these kinds is used.
KINDS = (
    KindFacts(ValueKind.TENSORS, Tensors, "n", "tensors"),
    KindFacts(ValueKind.JSON, bytes, "j", "JSON values"),
    KindFacts(ValueKind.BYTES, Octets, "o", "octets"),
    KindFacts(ValueKind.TEXT, str, "t", "texts"),
)
KIND = {facts.kind: facts for facts in KINDS}
KIND_OF_LETTER = {facts.letter: facts for facts in KINDS}
_KIND_OF_TYPE = {facts.type: facts for facts in KINDS}


def kind_of(value: Value) -> KindFacts:
    """Return the facts about a value's kind."""
    return _KIND_OF_TYPE[type(value)]


class WeightLine(msgspec.Struct, frozen=True, array_like=True):
    """Estimate of an input's weight: `fixed`, plus `by_octet` for each octet of the input."""

    fixed: float
    by_octet: float


class CostShape(enum.Enum):
    """Quantity that determines the run time of a call."""

    NUMBER = "number"
    WEIGHT = "weight"
    PADDED = "padded"


class CostLine(msgspec.Struct, frozen=True, array_like=True):
    """Run time of a call as a linear function."""

    shape: CostShape
    alpha: float  # Fixed part in seconds.
    beta: float  # Seconds for each input, unit of weight, or padded unit of weight.
    longest: float = 1.0  # Recent mean of the weight to which each input is padded: that of the heaviest in its batch.
    error: float = 0.0  # Recent mean error of the forecasts, relative to the run time.


class RowsTogether(enum.Enum):
    """Tensor rows that may share a call: any, only those of one shape, or only those that can be padded to one shape."""

    ANY = ""
    SHAPE = "shape"
    PADDED = "padded"


# Names of the parameters that apply to an entire call, or `all`. Only requests with the same values for them share a batch.
PerCall = tuple[str, ...] | Literal["all"]
ALL_PARAMETERS: Final = "all"


class Signature(msgspec.Struct, frozen=True):
    """Signature of a target, derived from its annotations and attributes."""

    takes: ValueKind = ValueKind.TEXT  # Kind of the inputs.
    gives: ValueKind = ValueKind.TEXT  # Kind of the outputs.
    example: Value | None = None
    weight: WeightLine | None = None  # Estimate of the target's weight function.
    cost: CostLine | None = None  # Run time of a call; None if unknown, or if only the number of inputs counts.
    inputs: tuple[TensorSpec, ...] = ()  # Tensors that it accepts, if known.
    outputs: tuple[TensorSpec, ...] = ()  # Tensors that it returns, if known.
    together: RowsTogether = RowsTogether.ANY
    sees: PerCall = ALL_PARAMETERS  # Request parameters that are passed to the target.
    per_call: PerCall = ()  # Parameters that apply to an entire call.

    @property
    def warm_up_input(self) -> Value | None:
        """Input for the warm-up batch, which must succeed before the target gets real inputs. None if no valid input is known."""
        if self.example is None and self.takes is ValueKind.TEXT:
            return WARM_UP
        return self.example


WARM_UP = "warm-up"  # Warm-up input for a target that accepts any text. Later probes use it too.
