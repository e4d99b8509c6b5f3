"""Members of the JSON object of an inference request, and bodies for models that take tensors.

Such a model accepts inputs of any datatype, each as JSON or as binary data. The binary data follow the JSON object, in the order of the
inputs that have a `binary_data_size`. All heads are checked before any data.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, cast

import msgspec
from msgspec.structs import replace

from headway.config import Settings
from headway.core import tensor_json
from headway.core.json_pages import SHORT, Steps, members, split
from headway.core.tensors import (
    ALIGNED,
    BYTES,
    MOST_AXES,
    MOST_TENSORS,
    SIZES,
    NoTensors,
    TensorHead,
    count_of,
    opening,
    quoted,
)
from headway.core.values import name_of, of_json
from headway.doors.bodies import (
    ABSENT,
    MOST_MEMBERS,
    decode_problem,
    members_in_steps,
    parameter_members,
    parameters_in_steps,
    struct_reader,
)
from headway.doors.exchange import Exchange, WriteAnswer
from headway.errors import BadRequest
from headway.gateway.served_model import ServedModel
from headway.model import RequestOptions, Tensors, TensorSpec, ValueKind
from headway.oip.model_tensors import (
    WantedOutput,
    check_names,
    checked_heads,
    names_of,
    value_in_steps,
    value_of,
    value_of_raw,
)
from headway.oip.parameters import KNOWN, NONE, Wishes, for_target, read_wishes

LENGTH_FIELD = "Inference-Header-Content-Length"  # Length in bytes of the JSON object, in requests and answers.
_SHORT = 200  # Maximum size in bytes of parameters or of a shape that is cached.
_LONGEST_SHAPE = 24 * MOST_AXES
_LONGEST_OUTPUTS = 1 << 15

_Dimension = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class InputParameters(msgspec.Struct, gc=False):
    """The parameters of an input that Headway reads."""

    binary_data_size: _Size | None = None
    shared_memory_region: msgspec.Raw = ABSENT


class AskedInput(msgspec.Struct, gc=False):
    """An input of a request. How its shape and data are decoded depends on the model."""

    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = ABSENT
    parameters: InputParameters | None = None


class LongRequest(msgspec.Struct, gc=False):
    """The long JSON object of a request, whose members are decoded later."""

    inputs: msgspec.Raw
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class OutputParameters(msgspec.Struct, gc=False):
    """The parameters of a requested output."""

    binary_data: bool | None = None
    classification: msgspec.Raw = ABSENT
    shared_memory_region: msgspec.Raw = ABSENT


class AskedOutput(msgspec.Struct, gc=False):
    """A requested output."""

    name: str
    parameters: OutputParameters | None = None


_take_input = struct_reader(AskedInput, ("shape", "data"))
take_request = struct_reader(LongRequest, ("inputs", "outputs", "parameters"))  # Raises BadRequest.


def array_of(kind: Any) -> Any:
    """Return a struct type that decodes an array's elements as `kind`. It ignores all but the first MOST_TENSORS + 1."""
    fields = [(f"e{number}", kind | msgspec.UnsetType, msgspec.UNSET) for number in range(MOST_TENSORS + 1)]
    return msgspec.defstruct("Members", fields, array_like=True, gc=False)


_is_set = partial(operator.is_not, msgspec.UNSET)


def members_of(array: Any) -> list[Any]:
    """Return the elements of an array that was decoded as an `array_of` type."""
    return list(itertools.takewhile(_is_set, msgspec.structs.astuple(array)))


_decode_shape = lru_cache(maxsize=256)(msgspec.json.Decoder(tuple[_Dimension, ...]).decode)
_decode_outputs = msgspec.json.Decoder(array_of(AskedOutput) | None).decode
_decode_figure = msgspec.json.Decoder(int | float | bool).decode


def cut(body: bytes, length: int) -> tuple[bytes, memoryview]:
    """Split a body into its JSON object and the binary data. Raises BadRequest if the body is too short."""
    if length > len(body):
        raise BadRequest(f"{LENGTH_FIELD} is {length}, but the body has {len(body)} bytes")
    return bytes(body[:length]), memoryview(body)[length:]


def refuse_shared_memory(parameters: InputParameters) -> None:
    """Raise BadRequest if an input's data are in shared memory."""
    if parameters.shared_memory_region is not ABSENT:
        raise BadRequest("shared memory is not supported; send the input's data in the body")


def shape_of(tensor: AskedInput, place: int = 0) -> tuple[int, ...]:
    """Return the shape of the input at `place`. Raises BadRequest if it is malformed or too long."""
    text = bytes(tensor.shape)
    if len(text) > _LONGEST_SHAPE:
        raise BadRequest(f"the `shape` field is {len(text)} bytes long; expected at most {_LONGEST_SHAPE}")
    try:
        return _decode_shape(text)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, f"$.inputs[{place}].shape")) from None


def wanted_outputs(raw: msgspec.Raw, *, binary: bool) -> tuple[WantedOutput, ...]:
    """Decode the member `outputs`: the requested outputs, or () for all. `binary` is the default form. Raises BadRequest if the
    member is malformed, or requests an unsupported feature."""
    if (size := len(bytes(raw))) > _LONGEST_OUTPUTS:
        raise BadRequest(f"the list of outputs is {size} bytes long; the limit is {_LONGEST_OUTPUTS} - at `$.outputs`")
    try:
        array = _decode_outputs(raw)
    except msgspec.MsgspecError as exc:
        raise BadRequest(placed(exc, "$.outputs")) from None
    wanted: list[WantedOutput] = []
    for output in members_of(array) if array is not None else ():
        asked = output.parameters
        if asked is not None and asked.classification is not ABSENT:
            raise BadRequest("`classification` is not supported; leave it out")
        if asked is not None and asked.shared_memory_region is not ABSENT:
            raise BadRequest("shared memory is not supported; outputs are sent in the body")
        form = None if asked is None else asked.binary_data
        wanted.append(WantedOutput(output.name, binary if form is None else form))
    if len(wanted) > MOST_TENSORS:
        raise BadRequest(f"the request lists more than {MOST_TENSORS} outputs")
    return tuple(wanted)


def parameters_of(raw: msgspec.Raw, limit: int, tiers: int) -> tuple[Wishes, bytes]:
    """Return the client's wishes and the target's parameters as JSON, from up to `limit` parameters. Raises BadRequest."""
    if raw is ABSENT:
        return NONE, b""
    text = bytes(raw)
    return (_cached_split if len(text) <= _SHORT else _split)(text, limit, tiers)


def long_parameters_of(raw: msgspec.Raw, limit: int, tiers: int) -> Steps[tuple[Wishes, bytes]]:
    """Decode long parameters (valid JSON) in steps; see `parameters_of`."""
    text = bytes(raw)
    if len(text) <= SHORT:
        return parameters_of(raw, limit, tiers)
    return _parted((yield from parameters_in_steps(text, limit)), text, tiers)


def long_inputs_of(raw: msgspec.Raw, limit: int) -> Steps[list[AskedInput] | None]:
    """Return a request's inputs, given as valid JSON, or None if there are more than `limit`. Raises BadRequest."""
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
    """Return the message of an error in a part of the body, including the part's path, such as `$.inputs[0].data`."""
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
    try:
        return _decode_figure(raw)
    except msgspec.MsgspecError:
        return None


_MOST_CACHED = 1024  # Maximum size in bytes of a JSON object that is cached if binary data follow. Clients repeat it.
_MOST_OBJECTS = 256
_EMPTY = msgspec.Raw(b"[]")
Specs = tuple[TensorSpec, ...]


class _Request(msgspec.Struct, gc=False):
    inputs: array_of(AskedInput)  # type: ignore[valid-type]
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class _Parsed(msgspec.Struct, frozen=True, gc=False):
    """The JSON object of a request: its inputs, their checked heads, and members of the TensorsRequest. If all data follow the
    object and can be packed unchanged, `size` is the number of bytes of data, and `opening` is the start of the packed value,
    up to the data. Otherwise, `size` is -1."""

    id: str | None
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...]
    inputs: list[AskedInput]
    heads: tuple[TensorHead, ...]
    size: int
    opening: bytes


class TensorsRequest(msgspec.Struct, gc=False):
    """An inference request for a model that takes tensors, from an HTTP body or a gRPC message. `value` has the packed inputs. The
    answer repeats `id`, which may be None or empty. `parameters` has the target's parameters as JSON, or is empty. `wanted` has the
    requested outputs; empty means all. `shape` is the shape of the output if the model doesn't return tensors."""

    id: str | None
    value: Tensors
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...] = ()
    shape: tuple[int, ...] = (1,)

    def exchange(self, model: str, options: RequestOptions, takes: ValueKind | None, write: WriteAnswer) -> Exchange:
        if self.wishes is not NONE:
            options = self.wishes.applied_to(options)
        return Exchange(model, self.value, self.parameters, options, write, self.id or "", self.wishes.final)


_decode: Callable[[bytes], Any] = msgspec.json.Decoder(_Request).decode


def tensors_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], TensorsRequest]:
    """Return a function that decodes bodies; see `request_reader`."""
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters

    def parse(text: bytes, specs: Specs, outputs: Specs, max_rows: int) -> _Parsed:
        try:
            if not text.isascii():
                text.decode()
            request = _decode(text)
            wishes, parameters = parameters_of(request.parameters, most_parameters, tiers)
            return _checked(request, members_of(request.inputs), wishes, parameters, specs, outputs, max_rows)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, text)) from None

    cached_parse = lru_cache(maxsize=_MOST_OBJECTS)(parse)

    def read(body: bytes, length: int | None, served: ServedModel) -> TensorsRequest:
        specs, max_rows = served.inputs, served.settings.max_batch_size
        if length == 0:
            return TensorsRequest(None, value_of_raw(body, specs, max_rows), Wishes(binary=True), b"")
        text, binary = (body, None) if length is None else cut(body, length)
        short = length is not None and length <= _MOST_CACHED
        parsed = (cached_parse if short else parse)(text, specs, served.outputs, max_rows)
        if binary is not None and len(binary) == parsed.size:
            value = packed_in_place(binary, parsed.opening)
        else:
            value = value_of(parsed.heads, _data(parsed.inputs, parsed.heads, binary))
        return TensorsRequest(parsed.id, value, parsed.wishes, parsed.parameters, parsed.wanted)

    return read


def long_tensors_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], Steps[TensorsRequest]]:
    """Return a function that decodes long bodies in steps; see `request_reader`."""
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters
    read_short = tensors_reader(settings)

    def parse(text: bytes, served: ServedModel) -> Steps[_Parsed]:
        request = take_request((yield from members_in_steps(text)))
        wishes, parameters = NONE, b""
        if request.parameters is not ABSENT:
            wishes, parameters = yield from long_parameters_of(request.parameters, most_parameters, tiers)
        inputs = yield from long_inputs_of(request.inputs, MOST_TENSORS)
        if inputs is None:
            raise BadRequest(f"the request has more than {MOST_TENSORS} inputs; expected 1 to {MOST_TENSORS}")
        max_rows = served.settings.max_batch_size
        return _checked(request, inputs, wishes, parameters, served.inputs, served.outputs, max_rows)

    def read(body: bytes, length: int | None, served: ServedModel) -> Steps[TensorsRequest]:
        text, binary = (bytes(body), None) if length is None else cut(body, length)
        if len(text) <= SHORT and len(body) - len(text) <= SHORT:
            return read_short(body, length, served)
        parsed = yield from parse(text, served)
        if binary is not None and len(binary) == parsed.size:
            value = packed_in_place(binary, parsed.opening)
        else:
            data = yield from _data_in_steps(parsed.inputs, parsed.heads, binary)
            value = yield from value_in_steps(parsed.heads, data)
        return TensorsRequest(parsed.id, value, parsed.wishes, parsed.parameters, parsed.wanted)

    return read


def _checked(
    sent: Any, inputs: list[AskedInput], wishes: Wishes, parameters: bytes, specs: Specs, outputs: Specs, rows: int
) -> _Parsed:
    """Return a request's JSON object once its requested outputs and the heads of its inputs are checked. Inputs may have up to
    `rows` rows. Raises RequestError."""
    wanted = () if sent.outputs is ABSENT else wanted_outputs(sent.outputs, binary=wishes.binary)
    check_names([output.name for output in wanted], names_of(outputs))
    given = [TensorHead(tensor.name, tensor.datatype, shape_of(tensor, place)) for place, tensor in enumerate(inputs)]
    heads = checked_heads(given, specs, rows)
    total = 0
    for tensor, head in zip(inputs, heads, strict=True):
        asked = tensor.parameters
        if asked is None or head.datatype == BYTES or total % ALIGNED:
            break
        size = SIZES[head.datatype] * count_of(head.shape)
        if asked.binary_data_size != size or asked.shared_memory_region is not ABSENT or tensor.data is not ABSENT:
            break
        total += size
    else:
        return _Parsed(sent.id, wishes, parameters, wanted, inputs, heads, total, opening(heads))
    return _Parsed(sent.id, wishes, parameters, wanted, inputs, heads, -1, b"")


def packed_in_place(data: memoryview, opening: bytes) -> Tensors:
    """Return the packed value of the data at the end of a body or message. `opening` is the value up to the data. In a large body,
    which has its own writable memory, the opening is written in front of the data. In other bodies, the data are copied."""
    padding, room = -len(data) % ALIGNED, memoryview(data.obj)
    begin = len(room) - len(data) - len(opening)
    if padding or begin < 0 or room.readonly:
        return Tensors(b"".join((opening, data, bytes(padding))))
    room[begin : begin + len(opening)] = opening
    return Tensors(cast(bytes, room[begin:].toreadonly()))


def _data(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> list[bytes | memoryview]:
    data: list[bytes | memoryview] = []
    end = 0
    for tensor, head in zip(inputs, heads, strict=True):
        size = None if tensor.parameters is None else tensor.parameters.binary_data_size
        if tensor.parameters is not None:
            refuse_shared_memory(tensor.parameters)
        if (size is None) is (tensor.data is ABSENT):
            has = "no data" if size is None else "both `data` and `binary_data_size`"
            raise BadRequest(
                f"the input {quoted(tensor.name)} has {has}; expected `data`, or `binary_data_size` in its parameters"
            )
        if size is None:
            try:
                data.append(tensor_json.read(bytes(tensor.data), head.name, head.datatype, head.shape))
            except NoTensors as exc:
                raise BadRequest(str(exc)) from None
            continue
        if binary is None:
            raise BadRequest(
                f"the input {quoted(tensor.name)} has `binary_data_size`, but the header field {LENGTH_FIELD} is missing; expected "
                "the length of the JSON object in bytes"
            )
        if size > len(binary) - end:
            raise BadRequest(
                f"the `binary_data_size` of the input {quoted(tensor.name)} is {size}, but {len(binary) - end} bytes are left after "
                "the JSON object and the previous inputs"
            )
        data.append(binary[end : end + size])
        end += size
    if binary is not None and end < len(binary):
        raise BadRequest(
            f"{len(binary)} bytes follow the JSON object, but the inputs have a total `binary_data_size` of {end}"
        )
    return data


def _data_in_steps(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> Steps[list[bytes | memoryview]]:
    long = [len(bytes(tensor.data)) > SHORT for tensor in inputs]
    data = _data(  # Long arrays are replaced by empty ones at first.
        [replace(tensor, data=_EMPTY) if is_long else tensor for tensor, is_long in zip(inputs, long, strict=True)],
        [replace(head, shape=(0,)) if is_long else head for head, is_long in zip(heads, long, strict=True)],
        binary,
    )
    for place, head in enumerate(heads):
        if long[place]:
            text = bytes(inputs[place].data)
            try:
                data[place] = yield from tensor_json.read_in_steps(text, head.name, head.datatype, head.shape)
            except NoTensors as exc:
                raise BadRequest(str(exc)) from None
    return data
