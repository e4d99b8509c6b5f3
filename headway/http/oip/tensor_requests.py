"""Bodies of inference requests for models that take tensors: several inputs of any datatype, each in JSON or in binary data.

The binary data follow the JSON object in the order of the inputs that have a `binary_data_size`. All heads are checked before any
data are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headway.config import Settings
from headway.core import tensor_json
from headway.core.tensors import NoTensors, TensorHead, quoted
from headway.errors import BadRequest
from headway.gateway.served_model import ServedModel
from headway.http.inference.bad_bodies import why_not
from headway.http.inference.bodies import ABSENT, CheckValue
from headway.http.inference.exchange import Exchange, WriteAnswer
from headway.http.oip.bodies import (
    LENGTH_FIELD,
    AskedInput,
    array_of,
    cut,
    members_of,
    parameters_of,
    refuse_shared_memory,
    shape_of,
    wanted_outputs,
)
from headway.model import RequestOptions, Tensors, ValueKind
from headway.oip.inputs import checked_heads, value_of, value_of_raw
from headway.oip.outputs import WantedOutput, check_names, names_of
from headway.oip.parameters import NONE, Wishes


class _Request(msgspec.Struct, gc=False):
    inputs: array_of(AskedInput)  # type: ignore[valid-type]
    id: str | None = None
    outputs: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT


class TensorsRequest(msgspec.Struct, gc=False):
    """Inference request for a model that takes tensors, decoded from a body or from a message of gRPC.

    Attributes:
        id: id that the client gave it, to be echoed; None, or empty over gRPC, for none.
        value: its inputs, packed.
        wishes: wishes among its parameters; whether outputs that it does not name are binary.
        parameters: text of a JSON object with the parameters for the target, or empty.
        wanted: outputs that it asks for; none: all.
        shape: shape of its output where the model, against all that is known, gives none of tensors.
    """

    id: str | None
    value: Tensors
    wishes: Wishes
    parameters: bytes
    wanted: tuple[WantedOutput, ...] = ()
    shape: tuple[int, ...] = (1,)

    def exchange(
        self,
        model: str,
        options: RequestOptions,
        takes: ValueKind | None,
        check: CheckValue | None,
        write: WriteAnswer,
    ) -> Exchange:
        """Exchange of the request, with one entry; see `InferRequest.exchange`."""
        if self.wishes is not NONE:
            options = self.wishes.applied_to(options)
        return Exchange(model, self.value, self.parameters, options, write, self.id or "", self.wishes.final)


_decode: Callable[[bytes], Any] = msgspec.json.Decoder(_Request).decode


def tensors_reader(settings: Settings) -> Callable[[bytes, int | None, ServedModel], TensorsRequest]:
    """Make the function that reads bodies; its arguments are those of `headway.http.oip.requests.request_reader`'s.

    Arguments:
        settings: bounds of parameters, and tiers.
    """
    tiers, most_parameters = len(settings.tier_names), settings.max_parameters

    def read(body: bytes, length: int | None, served: ServedModel) -> TensorsRequest:
        specs, most = served.inputs, served.settings.max_batch_size
        if length == 0:
            return TensorsRequest(None, value_of_raw(body, specs, most), Wishes(binary=True), b"")
        text, binary = (body, None) if length is None else cut(body, length)
        try:
            if not text.isascii():
                text.decode()
            asked = _decode(text)
            wishes, parameters = parameters_of(asked.parameters, most_parameters, tiers)
            wanted = () if asked.outputs is ABSENT else wanted_outputs(asked.outputs, binary=wishes.binary)
            check_names([one.name for one in wanted], names_of(served.outputs))
            inputs: list[AskedInput] = members_of(asked.inputs)
            given = [TensorHead(one.name, one.datatype, shape_of(one, place)) for place, one in enumerate(inputs)]
            heads = checked_heads(given, specs, most)
            value = value_of(heads, _data(inputs, heads, binary))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(why_not(exc, text)) from None
        return TensorsRequest(asked.id, value, wishes, parameters, wanted)

    return read


def _data(
    inputs: Sequence[AskedInput], heads: Sequence[TensorHead], binary: memoryview | None
) -> list[bytes | memoryview]:
    """Data of each input in the binary form. Raises BadRequest."""
    found: list[bytes | memoryview] = []
    end = 0
    for one, head in zip(inputs, heads, strict=True):
        size = None if one.parameters is None else one.parameters.binary_data_size
        if one.parameters is not None:
            refuse_shared_memory(one.parameters)
        if (size is None) is (one.data is ABSENT):
            has = "no data" if size is None else "both `data` and `binary_data_size`"
            raise BadRequest(
                f"the input {quoted(one.name)} has {has}; expected `data`, or `binary_data_size` in its parameters"
            )
        if size is None:
            found.append(_data_in_json(bytes(one.data), head))
            continue
        if binary is None:
            raise BadRequest(
                f"the input {quoted(one.name)} has `binary_data_size`, and the header field {LENGTH_FIELD} is missing; expected the "
                "length of the JSON object in bytes"
            )
        if size > len(binary) - end:
            raise BadRequest(
                f"the `binary_data_size` of the input {quoted(one.name)} is {size}, and {len(binary) - end} bytes are left behind the "
                "JSON object and the inputs before"
            )
        found.append(binary[end : end + size])
        end += size
    if binary is not None and end < len(binary):
        raise BadRequest(
            f"{len(binary)} bytes follow the JSON object, and the inputs have a `binary_data_size` of {end} in all"
        )
    return found


def _data_in_json(text: bytes, head: TensorHead) -> bytes:
    try:
        return tensor_json.read(text, head.name, head.datatype, head.shape)
    except NoTensors as exc:
        raise BadRequest(str(exc)) from None
