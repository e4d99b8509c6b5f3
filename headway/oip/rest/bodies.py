"""JSON object of an inference request, whatever the model takes: structs of its members, and functions that read them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec

from headway.core.json_pages import SHORT, Steps, members, split
from headway.core.tensors import MOST_AXES, MOST_TENSORS
from headway.core.values import name_of, of_json
from headway.doors.bodies import ABSENT, MOST_MEMBERS, parameter_members, parameters_in_steps, struct_reader
from headway.errors import BadRequest
from headway.oip.outputs import WantedOutput
from headway.oip.parameters import KNOWN, NONE, Wishes, for_target, read_wishes

LENGTH_FIELD = "Inference-Header-Content-Length"
"""Header field with the length of the JSON object, in requests and answers."""

_SHORT = 200
"""Longest parameters, or shape, to cache the result of, in bytes."""
_LONGEST_SHAPE = 24 * MOST_AXES

_LONGEST_OUTPUTS = 1 << 15

_Dimension = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class InputParameters(msgspec.Struct, gc=False):
    """Parameters of an input that Headway reads."""

    binary_data_size: _Size | None = None
    shared_memory_region: msgspec.Raw = ABSENT


class AskedInput(msgspec.Struct, gc=False):
    """Input of a request. Its shape and data are read once it is known what the model takes."""

    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = ABSENT
    parameters: InputParameters | None = None


class LongRequest(msgspec.Struct, gc=False):
    """Long JSON object of a request, whose members are decoded later."""

    inputs: msgspec.Raw
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class OutputParameters(msgspec.Struct, gc=False):
    """Parameters of a requested output."""

    binary_data: bool | None = None
    classification: msgspec.Raw = ABSENT
    shared_memory_region: msgspec.Raw = ABSENT


class AskedOutput(msgspec.Struct, gc=False):
    """Requested output."""

    name: str
    parameters: OutputParameters | None = None


_take_input = struct_reader(AskedInput, ("shape", "data"))
take_request = struct_reader(LongRequest, ("inputs", "outputs", "parameters"))
"""Make a LongRequest from the members of a JSON object. Raises BadRequest."""


def array_of(kind: Any) -> Any:
    """Make a struct for an array. Only the array's first MOST_TENSORS + 1 members are decoded."""
    fields = [(f"e{number}", kind | msgspec.UnsetType, msgspec.UNSET) for number in range(MOST_TENSORS + 1)]
    return msgspec.defstruct("Members", fields, array_like=True, gc=False)


_is_set = partial(operator.is_not, msgspec.UNSET)


def members_of(array: Any) -> list[Any]:
    """Return the members in a struct that `array_of` made."""
    return list(itertools.takewhile(_is_set, msgspec.structs.astuple(array)))


_decode_shape = lru_cache(maxsize=256)(msgspec.json.Decoder(tuple[_Dimension, ...]).decode)
_decode_outputs = msgspec.json.Decoder(array_of(AskedOutput) | None).decode
_decode_figure = msgspec.json.Decoder(int | float | bool).decode


def cut(body: bytes, length: int) -> tuple[bytes, memoryview]:
    """Split a body into its JSON object and the binary data. Raises BadRequest if it is shorter than the object."""
    if length > len(body):
        raise BadRequest(f"{LENGTH_FIELD} is {length}, and the body has {len(body)} bytes")
    return bytes(body[:length]), memoryview(body)[length:]


def refuse_shared_memory(parameters: InputParameters) -> None:
    """Raise BadRequest if the data of an input are not in the body."""
    if parameters.shared_memory_region is not ABSENT:
        raise BadRequest("shared memory is not served here; send the data of the input in the body")


def shape_of(tensor: AskedInput, place: int = 0) -> tuple[int, ...]:
    """Return the shape of the input at `place`. Raises BadRequest if it is malformed or too long."""
    text = bytes(tensor.shape)
    if len(text) > _LONGEST_SHAPE:
        raise BadRequest(f"the `shape` field is {len(text)} bytes long; expected [n] or [n, 1]")
    try:
        return _decode_shape(text)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, f"$.inputs[{place}].shape")) from None


def wanted_outputs(raw: msgspec.Raw, *, binary: bool) -> tuple[WantedOutput, ...]:
    """Read the member `outputs`: the requested outputs, or none for all. With `binary`, their default is the binary form. Raises
    BadRequest if the member is malformed, or asks for something that isn't served."""
    if (size := len(bytes(raw))) > _LONGEST_OUTPUTS:
        raise BadRequest(f"the outputs are {size} bytes; the limit is {_LONGEST_OUTPUTS} - at `$.outputs`")
    try:
        array = _decode_outputs(raw)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, "$.outputs")) from None
    wanted: list[WantedOutput] = []
    for output in members_of(array) if array is not None else ():
        asked = output.parameters
        if asked is not None and asked.classification is not ABSENT:
            raise BadRequest("`classification` is not served here; leave it out")
        if asked is not None and asked.shared_memory_region is not ABSENT:
            raise BadRequest("shared memory is not served here; the output comes in the body")
        form = None if asked is None else asked.binary_data
        wanted.append(WantedOutput(output.name, binary if form is None else form))
    if len(wanted) > MOST_TENSORS:
        raise BadRequest(f"the request asks for more than {MOST_TENSORS} outputs")
    return tuple(wanted)


def parameters_of(raw: msgspec.Raw, limit: int, tiers: int) -> tuple[Wishes, bytes]:
    """Return the wishes among the parameters, and those for the target in JSON. Raises BadRequest if they are not an object or
    more than `limit`, or if one of them is out of range."""
    if raw is ABSENT:
        return NONE, b""
    text = bytes(raw)
    return (_cached_split if len(text) <= _SHORT else _split)(text, limit, tiers)


def long_parameters_of(raw: msgspec.Raw, limit: int, tiers: int) -> Steps[tuple[Wishes, bytes]]:
    """Read parameters that may be long, known to be valid JSON, in steps; see `parameters_of`."""
    text = bytes(raw)
    if len(text) <= SHORT:
        return parameters_of(raw, limit, tiers)
    return _parted((yield from parameters_in_steps(text, limit)), text, tiers)


def long_inputs_of(raw: msgspec.Raw, limit: int) -> Steps[list[AskedInput] | None]:
    """Return the inputs of a request, known to be valid JSON, or None if there are more than `limit`. Raises BadRequest."""
    text = bytes(raw)
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array`, got `{name_of(of_json(text))}` - at `$.inputs`")
    if (parts := (yield from split(text, limit))) is None:
        return None
    inputs = []
    for place, part in enumerate(parts):
        where = f"$.inputs[{place}]"
        if part[:1] != b"{":
            raise BadRequest(f"Expected `object`, got `{name_of(of_json(part))}` - at `{where}`")
        if (given := (yield from members(part, MOST_MEMBERS))) is None:
            raise BadRequest(f"an input has more than {MOST_MEMBERS} members - at `{where}`")
        if len(given.get("parameters", b"")) > SHORT:
            raise BadRequest(f"the parameters of an input take more than {SHORT} bytes - at `{where}.parameters`")
        try:
            inputs.append(_take_input(given))
        except BadRequest as exc:
            raise BadRequest(exc.message.replace("`$", f"`{where}", 1)) from None
    return inputs


def placed(exc: msgspec.MsgspecError, place: str) -> str:
    """Return the message of an error in a part of the body, with the part's place, such as `$.inputs[0].data`."""
    message = str(exc)
    return message.replace("`$", f"`{place}", 1) if "`$" in message else f"{message} - at `{place}`"


def _split(text: bytes, limit: int, tiers: int) -> tuple[Wishes, bytes]:
    return _parted(parameter_members(text, limit), text, tiers)


_cached_split = lru_cache(maxsize=256)(_split)  # Clients send the same parameters again and again.


def _parted(given: Mapping[str, msgspec.Raw], text: bytes, tiers: int) -> tuple[Wishes, bytes]:
    if not given:
        return NONE, b""
    asked = {name: _figure(given[name]) for name in KNOWN if name in given}
    if not asked:
        return NONE, text
    wishes = read_wishes(asked, tiers)
    own = for_target(given)
    return wishes, msgspec.json.encode(own) if own else b""


def _figure(raw: msgspec.Raw) -> object:
    """Return a JSON number or boolean, or None for anything else, which is not decoded."""
    try:
        return _decode_figure(raw)
    except msgspec.MsgspecError:
        return None
