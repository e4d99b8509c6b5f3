"""Bodies of inference requests: one JSON object, and behind it the binary data of its input, if that is not in the object.

The length of the object is in the header field Inference-Header-Content-Length where binary data follow. A length of 0
means that the whole body is one element, without any length before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

import msgspec

from headway.config import Settings
from headway.errors import BadRequest
from headway.gateway.fan_out import MOST_INPUTS
from headway.http.inference.bad_bodies import why_not
from headway.http.inference.bodies import ABSENT, CheckValue, first_elements, parameter_members
from headway.http.inference.exchange import Exchange, WriteAnswer
from headway.model import RequestOptions, ValueKind
from headway.oip.elements import Element, values_of
from headway.oip.parameters import KNOWN, NONE, Wishes, for_target, read_wishes
from headway.oip.tensors import (
    OUTPUT,
    check_outputs,
    count_elements,
    unpack,
    wrong_number,
)

LENGTH_FIELD = "Inference-Header-Content-Length"
"""Header field with the length of the JSON object, in requests and answers."""

_SHORT = 200
"""Bytes of parameters, or of a shape, up to which what was read of them is remembered."""
_MANY_COMMAS = 4 * MOST_INPUTS
"""Commas in the data of a tensor beyond which it may have far too many elements."""

_Dimension = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _InputParameters(msgspec.Struct, gc=False):
    binary_data_size: _Size | None = None
    shared_memory_region: msgspec.Raw = ABSENT


class _Input(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = ABSENT
    parameters: _InputParameters | None = None


class _Inputs(msgspec.Struct, gc=False, array_like=True):
    first: _Input | msgspec.UnsetType = msgspec.UNSET
    second: msgspec.Raw = ABSENT


class _OutputParameters(msgspec.Struct, gc=False):
    binary_data: bool | None = None
    classification: msgspec.Raw = ABSENT
    shared_memory_region: msgspec.Raw = ABSENT


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputParameters | None = None


class _Outputs(msgspec.Struct, gc=False, array_like=True):
    first: _Output | msgspec.UnsetType = msgspec.UNSET
    second: msgspec.Raw = ABSENT


class _Request(msgspec.Struct, gc=False):
    inputs: _Inputs
    id: str | None = None
    outputs: _Outputs | None = None
    parameters: msgspec.Raw = ABSENT


class InferRequest(msgspec.Struct, gc=False):
    """Inference request, decoded from a body or from a message of gRPC.

    Attributes:
        id: id that the client gave it, to be echoed; None, or empty over gRPC, for none.
        shape: shape of its input.
        elements: elements of its input.
        wishes: wishes among its parameters. Whether its output is binary is decided.
        parameters: text of a JSON object with the parameters for the target, or empty.
    """

    id: str | None
    shape: tuple[int, ...]
    elements: list[Element]
    wishes: Wishes
    parameters: bytes

    def exchange(
        self,
        model: str,
        options: RequestOptions,
        takes: ValueKind | None,
        check: CheckValue | None,
        write: WriteAnswer,
    ) -> Exchange:
        """Exchange of the request.

        Arguments:
            model: name of the model.
            options: options by its head.
            takes: kind of values that the model takes; None while it is not known.
            check: checks each of them, and returns what the model gets; None for nothing to check.
            write: writes the answer.

        Raises:
            RequestError: an element is no such value, or is refused.
        """
        values, wishes = values_of(self.elements, takes), self.wishes
        if check is not None:
            values = list(map(check, values))
        if wishes is not NONE:
            options = wishes.applied_to(options)
        input = values[0] if len(values) == 1 else values
        return Exchange(model, input, self.parameters, options, write, self.id or "", wishes.final)


_decode = msgspec.json.Decoder(_Request).decode
_decode_shape = lru_cache(maxsize=256)(msgspec.json.Decoder(tuple[_Dimension, ...]).decode)
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_nested = msgspec.json.Decoder(list[tuple[str]]).decode
_decode_figure = msgspec.json.Decoder(int | float | bool).decode


def request_reader(settings: Settings) -> Callable[[bytes, int | None], InferRequest]:
    """Make the function that reads bodies; its second argument is the length of the JSON object, None for all of the body.

    Arguments:
        settings: bounds of inputs and parameters.
    """
    most, tiers, most_parameters = (
        min(MOST_INPUTS, settings.max_queue),
        len(settings.tier_names),
        settings.max_parameters,
    )

    def read(body: bytes, length: int | None) -> InferRequest:
        if length == 0:
            return InferRequest(None, (1,), [bytes(body)], Wishes(binary=True), b"")
        binary = None
        if length is not None:
            if length > len(body):
                raise BadRequest(f"{LENGTH_FIELD} is {length}, and the body has {len(body)} bytes")
            binary = memoryview(body)[length:]
            body = bytes(body[:length])
        try:
            if not body.isascii():
                body.decode()
            asked = _decode(body)
            wishes, parameters = _parameters(asked.parameters, most_parameters, tiers)
            tensor = _only_input(asked.inputs)
            shape = _shape(tensor)
            count = count_elements(tensor.name, tensor.datatype, shape, most)
            elements = _elements(tensor, count, binary)
            if asked.outputs is not None:
                wishes = _with_outputs(wishes, asked.outputs)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(why_not(exc, body)) from None
        return InferRequest(asked.id, shape, elements, wishes, parameters)

    return read


def _only_input(inputs: _Inputs) -> _Input:
    tensor = inputs.first
    if isinstance(tensor, msgspec.UnsetType) or inputs.second is not ABSENT:
        raise wrong_number(0 if isinstance(tensor, msgspec.UnsetType) else 2)
    if tensor.parameters is not None and tensor.parameters.shared_memory_region is not ABSENT:
        raise BadRequest("shared memory is not served here; send the data of the input in the body")
    return tensor


def _shape(tensor: _Input) -> tuple[int, ...]:
    text = bytes(tensor.shape)
    if len(text) > _SHORT:
        raise BadRequest(f"the shape of the input takes {len(text)} bytes; expected [n] or [n, 1]")
    try:
        return _decode_shape(text)
    except msgspec.MsgspecError as exc:
        raise BadRequest(_placed(exc, "shape")) from None


def _elements(tensor: _Input, count: int, binary: memoryview | None) -> list[Element]:
    size = None if tensor.parameters is None else tensor.parameters.binary_data_size
    if size is None:
        if tensor.data is ABSENT:
            raise BadRequest("the input has no data; expected `data`, or `binary_data_size` in its parameters")
        if binary:
            raise BadRequest(f"{len(binary)} bytes follow the JSON object, and the input has no `binary_data_size`")
        return _texts(bytes(tensor.data), tensor.name, count)
    if tensor.data is not ABSENT:
        raise BadRequest("the input has both `data` and `binary_data_size`; expected one of them")
    if binary is None:
        raise BadRequest(
            f"the input has `binary_data_size`, and the header field {LENGTH_FIELD} is missing; expected the length of the JSON "
            "object in bytes"
        )
    if size != len(binary):
        raise BadRequest(f"`binary_data_size` is {size}, and {len(binary)} bytes follow the JSON object")
    return [*unpack(tensor.name, binary, count)]


def _texts(text: bytes, name: str, count: int) -> list[Element]:
    """Elements in JSON, also each in an array of its own."""
    nested = text[1:].lstrip(b" \t\r\n")[:1] == b"["
    many = text.count(b",") > _MANY_COMMAS
    try:
        if nested:
            found = [one for (one,) in (first_elements(tuple[str]) if many else _decode_nested)(text)]
        else:
            found = (first_elements(str) if many else _decode_texts)(text)
    except msgspec.MsgspecError as exc:
        raise BadRequest(_placed(exc, "data")) from None
    if len(found) != count:
        more = "or more " if many and len(found) > MOST_INPUTS else ""
        raise BadRequest(f"the data of the input have {len(found)} {more}elements, and its shape says {count}")
    return found


def _with_outputs(wishes: Wishes, outputs: _Outputs) -> Wishes:
    """Wishes, with what is said of the only output there is."""
    output = outputs.first
    if isinstance(output, msgspec.UnsetType):
        return wishes
    check_outputs([output.name] if outputs.second is ABSENT else [output.name, OUTPUT])
    asked = output.parameters
    if asked is None:
        return wishes
    if asked.classification is not ABSENT:
        raise BadRequest("`classification` is not served here; leave it out")
    if asked.shared_memory_region is not ABSENT:
        raise BadRequest("shared memory is not served here; the output comes in the body")
    if asked.binary_data is None or asked.binary_data is wishes.binary:
        return wishes
    return msgspec.structs.replace(wishes, binary=asked.binary_data)


def _parameters(raw: msgspec.Raw, most: int, tiers: int) -> tuple[Wishes, bytes]:
    """Wishes among the parameters, and the text of those for the target."""
    if raw is ABSENT:
        return NONE, b""
    text = bytes(raw)
    return (_split_often if len(text) <= _SHORT else _split)(text, most, tiers)


def _split(text: bytes, most: int, tiers: int) -> tuple[Wishes, bytes]:
    members = parameter_members(text, most)
    if not members:
        return NONE, b""
    asked = {name: _figure(members[name]) for name in KNOWN if name in members}
    if not asked:
        return NONE, text
    wishes = read_wishes(asked, tiers)
    rest = for_target(members)
    return wishes, msgspec.json.encode(rest) if rest else b""


def _figure(raw: msgspec.Raw) -> object:
    """Number or boolean of a JSON text; None for anything else, of which nothing is built."""
    try:
        return _decode_figure(raw)
    except msgspec.MsgspecError:
        return None


_split_often = lru_cache(maxsize=256)(_split)
"""Clients ask again and again with the same parameters."""


def _placed(exc: msgspec.MsgspecError, member: str) -> str:
    """Message of what is wrong in a member of the input, with its place in the body."""
    said = str(exc)
    place = f"$.inputs[0].{member}"
    return said.replace("`$", f"`{place}", 1) if "`$" in said else f"{said} - at `{place}`"
