"""The dialect `oip`: the Open Inference Protocol over HTTP, `POST /v2/models/NAME/infer`, with binary tensor data both ways.

A body is a JSON object followed by the data of each tensor. The object's length is in the field Inference-Header-Content-Length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headway.core.tensors import BYTES, MOST_AXES, MOST_TENSORS, Tensor, TensorHead
from headway.dialects.dialect import JSON_BODY, NO_JSON, BadMetadata, NoOutputs, Remote, RemoteCall, with_tokens
from headway.errors import SettingError
from headway.model import ItemResult, Value, ValueKind
from headway.oip.dialect import TensorDialect, sent_parameters
from headway.oip.metadata import Int64, TensorMetadata
from headway.oip.parameters import BINARY_OUTPUT

_INFER = re.compile("(?P<model>.*/v2/models/(?P<name>[^/]+)(?:/versions/[^/]+)?)/infer")
_LIGHT = 1 << 20
_NO_FIELDS: MappingProxyType[str, str] = MappingProxyType({})


class OpenInferenceHttp(TensorDialect, frozen=True):
    """The dialect `oip`."""

    path: ClassVar[str] = _INFER.pattern

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Accept a URL that names the model or, if `model` is set, a base URL. Any other URL is used unchanged."""
        parts = urlsplit(url)
        path = parts.path
        if model and "/v2/models/" not in path:
            path = f"{path.rstrip('/').removesuffix('/v2')}/v2/models/{quote(model, safe='')}/infer"
        match = _INFER.fullmatch(path)
        if model and (match is None or unquote(match["name"]) != model):
            hint = "Leave it out, or name the model in one of them."
            raise SettingError("remote_model", model, "is not the model that the URL names", hint)
        url = parts._replace(path=path).geturl()
        if match is None:
            return Remote(url, cls())
        metadata = RemoteCall(b"", _NO_FIELDS, parts._replace(path=match["model"]).geturl())
        index = f"{match['model'].partition('/v2/models/')[0]}/v2/repository/index"
        models = RemoteCall(b"{}", JSON_BODY, parts._replace(path=index).geturl())
        return Remote(url, cls(), metadata, models, unquote(match["name"]))

    def models(self, answer: bytes | bytearray) -> list[str]:
        try:
            return [model.name for model in _decode_index(answer)]
        except (*NO_JSON, msgspec.ValidationError):
            return []

    def learn(self, metadata: bytes | bytearray) -> Self:
        try:
            declared = _decode_metadata(metadata)
        except (*NO_JSON, msgspec.ValidationError):
            raise BadMetadata("the API's answer is not the metadata of a model. Check the URL.") from None
        return self.adapted(declared.inputs, declared.outputs)

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        tensors, own = self.sent(inputs), sent_parameters(parameters)
        head: dict[str, Any] = {
            "inputs": [
                {
                    "name": tensor.head.name,
                    "shape": tensor.head.shape,
                    "datatype": tensor.head.datatype,
                    "parameters": {"binary_data_size": tensor.size},
                }
                for tensor in tensors
            ]
        }
        if names := self.output_names:
            head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in names]
        else:
            own[BINARY_OUTPUT] = True
        if own:
            head["parameters"] = own
        text = msgspec.json.encode(head)
        fields = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
        return RemoteCall(b"".join([text, *(piece for tensor in tensors for piece in tensor.data)]), fields)

    def decode(
        self, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
    ) -> list[ItemResult]:
        if json_bytes < 0:
            raise NoOutputs("no binary data, although the request asks for it")
        if json_bytes > len(body):
            raise NoOutputs(f"{len(body)} bytes, but {json_bytes} bytes of JSON were announced")
        octets = memoryview(body)
        outputs, used = _outputs_in(octets[:json_bytes], several=self.signature.gives is ValueKind.TENSORS)
        heads = [TensorHead(output.name, output.datatype, tuple(output.shape)) for output in outputs]
        places = self.check_outputs(heads, expected, rows)
        data = _binary_data(octets[json_bytes:], [output.parameters.binary_data_size for output in outputs])
        tensors = [Tensor(heads[place], data[place]) for place in places]
        return with_tokens(self.results(tensors, expected, rows), used)

    def is_light(self, json_bytes: int) -> bool:
        signature = self.signature
        numbers = bool(self.outputs) and all(spec.datatype != BYTES for spec in self.outputs)
        return signature.gives is ValueKind.TENSORS and numbers and 0 <= json_bytes <= _LIGHT


class _Named(msgspec.Struct, gc=False):
    name: str


class _Metadata(msgspec.Struct, gc=False):
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()


class _Parameters(msgspec.Struct, frozen=True, gc=False):
    binary_data_size: Int64 | None = None


class _Tensor(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: Annotated[list[Int64], msgspec.Meta(max_length=MOST_AXES)]
    parameters: _Parameters = _Parameters()


class _Answer(msgspec.Struct, gc=False):
    outputs: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(min_length=1, max_length=MOST_TENSORS)]
    parameters: msgspec.Raw = msgspec.Raw(b"")


class _Used(msgspec.Struct, gc=False):
    tokens_used: int = 0


_decode_used: Any = msgspec.json.Decoder(_Used).decode
_decode_index: Any = msgspec.json.Decoder(list[_Named]).decode
_decode_metadata: Any = msgspec.json.Decoder(_Metadata).decode
_decode_answer: Any = msgspec.json.Decoder(_Answer).decode
_decode_tensor: Any = msgspec.json.Decoder(_Tensor).decode


def _outputs_in(text: memoryview, *, several: bool) -> tuple[list[_Tensor], int]:
    """Return the outputs of an answer (only one unless `several`), and the number of tokens from its parameters, or 0."""
    wrong = "no object with one member in its outputs"
    try:
        answer = _decode_answer(text)
        if len(answer.outputs) > 1 and not several:
            raise NoOutputs(wrong)
    except msgspec.ValidationError:
        raise NoOutputs(f"no object with 1 to {MOST_TENSORS} members in its outputs" if several else wrong) from None
    except NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None
    try:
        outputs = [_decode_tensor(raw) for raw in answer.outputs]
    except msgspec.ValidationError:
        raise NoOutputs("an output that is not a tensor") from None
    except NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None
    try:
        return outputs, int(_decode_used(answer.parameters).tokens_used)
    except NO_JSON:
        return outputs, 0


def _binary_data(octets: memoryview, sizes: Sequence[int | None]) -> list[memoryview]:
    if None in sizes:
        raise NoOutputs(f"{len(octets)} bytes of binary data, but does not say how many belong to an output")
    known = [size for size in sizes if size is not None]
    if min(known) < 0 or sum(known) != len(octets):
        raise NoOutputs(f"{len(octets)} bytes of binary data, but announces {sum(known)}")
    return [octets[end - size : end] for size, end in zip(known, accumulate(known), strict=True)]
