"""Members of the JSON objects of inference requests, whatever a model takes: their structs, and what is read of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
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
"""Bytes of parameters, or of a shape, up to which what was read of them is remembered."""
_LONGEST_SHAPE = 24 * MOST_AXES
"""Most bytes of a shape that is read."""

_LONGEST_OUTPUTS = 1 << 15
"""Most bytes of the outputs that a request asks for."""

_Dimension = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class InputParameters(msgspec.Struct, gc=False):
    """Parameters of an input that are heeded."""

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
    """Long JSON object of a request, whose members are read later."""

    inputs: msgspec.Raw
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class OutputParameters(msgspec.Struct, gc=False):
    """Parameters of an output that a request asks for."""

    binary_data: bool | None = None
    classification: msgspec.Raw = ABSENT
    shared_memory_region: msgspec.Raw = ABSENT


class AskedOutput(msgspec.Struct, gc=False):
    """Output that a request asks for."""

    name: str
    parameters: OutputParameters | None = None


_take_input = struct_reader(AskedInput, ("shape", "data"))
take_request = struct_reader(LongRequest, ("inputs", "outputs", "parameters"))
"""Makes a LongRequest of the members of a JSON object. Raises BadRequest."""


def array_of(kind: Any) -> Any:
    """Struct of the first members of an array, one more than there may be tensors; the others are skipped."""
    fields = [(f"e{number}", kind | msgspec.UnsetType, msgspec.UNSET) for number in range(MOST_TENSORS + 1)]
    return msgspec.defstruct("Members", fields, array_like=True, gc=False)


def members_of(array: Any) -> list[Any]:
    """Members of such a struct."""
    found: list[Any] = []
    for one in msgspec.structs.astuple(array):
        if one is msgspec.UNSET:
            break
        found.append(one)
    return found


_decode_shape = lru_cache(maxsize=256)(msgspec.json.Decoder(tuple[_Dimension, ...]).decode)
_decode_outputs = msgspec.json.Decoder(array_of(AskedOutput) | None).decode
_decode_figure = msgspec.json.Decoder(int | float | bool).decode


def cut(body: bytes, length: int) -> tuple[bytes, memoryview]:
    """JSON object of a body, and the binary data behind it. Raises BadRequest where the body is shorter than the object."""
    if length > len(body):
        raise BadRequest(f"{LENGTH_FIELD} is {length}, and the body has {len(body)} bytes")
    return bytes(body[:length]), memoryview(body)[length:]


def refuse_shared_memory(parameters: InputParameters) -> None:
    """Refuse an input that is not in the body. Raises BadRequest."""
    if parameters.shared_memory_region is not ABSENT:
        raise BadRequest("shared memory is not served here; send the data of the input in the body")


def shape_of(tensor: AskedInput, place: int = 0) -> tuple[int, ...]:
    """Shape of an input, at its place among the inputs. Raises BadRequest where it is none or too long."""
    text = bytes(tensor.shape)
    if len(text) > _LONGEST_SHAPE:
        raise BadRequest(f"the shape of the input takes {len(text)} bytes; expected [n] or [n, 1]")
    try:
        return _decode_shape(text)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, f"$.inputs[{place}].shape")) from None


def wanted_outputs(raw: msgspec.Raw, *, binary: bool) -> tuple[WantedOutput, ...]:
    """Outputs that a request asks for, by its member `outputs`; none: all.

    Arguments:
        raw: JSON text of the member.
        binary: whether an output of which nothing is said comes in the binary form.

    Raises:
        BadRequest: the member is malformed, or asks for what is not served.
    """
    if (size := len(bytes(raw))) > _LONGEST_OUTPUTS:
        raise BadRequest(f"the outputs take {size} bytes; at most {_LONGEST_OUTPUTS} are taken - at `$.outputs`")
    try:
        array = _decode_outputs(raw)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, "$.outputs")) from None
    found: list[WantedOutput] = []
    for output in members_of(array) if array is not None else ():
        asked = output.parameters
        if asked is not None and asked.classification is not ABSENT:
            raise BadRequest("`classification` is not served here; leave it out")
        if asked is not None and asked.shared_memory_region is not ABSENT:
            raise BadRequest("shared memory is not served here; the output comes in the body")
        said = None if asked is None else asked.binary_data
        found.append(WantedOutput(output.name, binary if said is None else said))
    if len(found) > MOST_TENSORS:
        raise BadRequest(f"the request asks for more than {MOST_TENSORS} outputs")
    return tuple(found)


def parameters_of(raw: msgspec.Raw, most: int, tiers: int) -> tuple[Wishes, bytes]:
    """Wishes among the parameters, and the text of those for the target.

    Arguments:
        raw: JSON text of the parameters.
        most: most parameters of a request.
        tiers: number of tiers.

    Raises:
        BadRequest: they are no such object, or one of them is out of range.
    """
    if raw is ABSENT:
        return NONE, b""
    text = bytes(raw)
    return (_split_often if len(text) <= _SHORT else _split)(text, most, tiers)


def long_parameters_of(raw: msgspec.Raw, most: int, tiers: int) -> Steps[tuple[Wishes, bytes]]:
    """The same of parameters that may be long, and are valid JSON; see `parameters_of`."""
    text = bytes(raw)
    if len(text) <= SHORT:
        return parameters_of(raw, most, tiers)
    return _parted((yield from parameters_in_steps(text, most)), text, tiers)


def long_inputs_of(raw: msgspec.Raw, most: int) -> Steps[list[AskedInput] | None]:
    """Inputs of a request, of valid JSON that may be long; None where there are more than `most`. Raises BadRequest."""
    text = bytes(raw)
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array`, got `{name_of(of_json(text))}` - at `$.inputs`")
    if (parts := (yield from split(text, most))) is None:
        return None
    found = []
    for place, part in enumerate(parts):
        where = f"$.inputs[{place}]"
        if part[:1] != b"{":
            raise BadRequest(f"Expected `object`, got `{name_of(of_json(part))}` - at `{where}`")
        if (given := (yield from members(part, MOST_MEMBERS))) is None:
            raise BadRequest(f"an input has more than {MOST_MEMBERS} members, which are the most - at `{where}`")
        if len(given.get("parameters", b"")) > SHORT:
            raise BadRequest(f"the parameters of an input take more than {SHORT} bytes - at `{where}.parameters`")
        try:
            found.append(_take_input(given))
        except BadRequest as exc:
            raise BadRequest(exc.message.replace("`$", f"`{where}", 1)) from None
    return found


def placed(exc: msgspec.MsgspecError, place: str) -> str:
    """Message of what is wrong in a part of the body, with its place in the body, for example `$.inputs[0].data`."""
    said = str(exc)
    return said.replace("`$", f"`{place}", 1) if "`$" in said else f"{said} - at `{place}`"


def _split(text: bytes, most: int, tiers: int) -> tuple[Wishes, bytes]:
    return _parted(parameter_members(text, most), text, tiers)


def _parted(given: Mapping[str, msgspec.Raw], text: bytes, tiers: int) -> tuple[Wishes, bytes]:
    if not given:
        return NONE, b""
    asked = {name: _figure(given[name]) for name in KNOWN if name in given}
    if not asked:
        return NONE, text
    wishes = read_wishes(asked, tiers)
    rest = for_target(given)
    return wishes, msgspec.json.encode(rest) if rest else b""


def _figure(raw: msgspec.Raw) -> object:
    """Number or boolean of a JSON text; None for anything else, of which nothing is built."""
    try:
        return _decode_figure(raw)
    except msgspec.MsgspecError:
        return None


_split_often = lru_cache(maxsize=256)(_split)
"""Clients ask again and again with the same parameters."""
