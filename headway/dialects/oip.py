"""Dialect `oip`: the Open Inference Protocol over HTTP, `POST /v2/models/NAME/infer`, with binary tensor data both ways.

A body is a JSON object, as long as the field Inference-Header-Content-Length says, and the tensor's octets after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headway.dialects import json_lists
from headway.dialects.dialect import JSON_BODY, BadMetadata, NoOutputs, Remote, RemoteCall
from headway.dialects.open_inference import MOST_DIMENSIONS, TensorDialect, binary_items, packed, sent_parameters
from headway.dialects.usage import with_tokens
from headway.errors import SettingError
from headway.model import ItemResult, Value
from headway.oip.metadata import Int64, TensorMetadata
from headway.oip.parameters import BINARY_OUTPUT
from headway.oip.tensors import BYTES

_INFER = re.compile("(?P<model>.*/v2/models/(?P<name>[^/]+)(?:/versions/[^/]+)?)/infer")
_NO_FIELDS: MappingProxyType[str, str] = MappingProxyType({})


class OpenInferenceHttp(TensorDialect, frozen=True):
    """Texts in; texts or lists of numbers out."""

    path: ClassVar[str] = _INFER.pattern

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Take a URL that names the model, or one to which the model's name is added; else it is taken as it is."""
        parts = urlsplit(url)
        path = parts.path
        if model and "/v2/models/" not in path:
            path = f"{path.rstrip('/').removesuffix('/v2')}/v2/models/{quote(model, safe='')}/infer"
        found = _INFER.fullmatch(path)
        if model and (found is None or unquote(found["name"]) != model):
            hint = "Leave it out, or name the model in one of them."
            raise SettingError("remote_model", model, "is another model than the URL names", hint)
        url = parts._replace(path=path).geturl()
        if found is None:
            return Remote(url, cls())
        metadata = RemoteCall(b"", _NO_FIELDS, parts._replace(path=found["model"]).geturl())
        index = f"{found['model'].partition('/v2/models/')[0]}/v2/repository/index"
        models = RemoteCall(b"{}", JSON_BODY, parts._replace(path=index).geturl())
        return Remote(url, cls(), metadata, models, unquote(found["name"]))

    def models(self, answer: bytes | bytearray) -> list[str]:
        """Read the names of the models in the repository index."""
        try:
            return [one.name for one in _decode_index(answer)]
        except (*json_lists.NO_JSON, msgspec.ValidationError):
            return []

    def learn(self, metadata: bytes | bytearray) -> Self:
        """Go by the tensors that the model's metadata names."""
        try:
            said = _decode_metadata(metadata)
        except (*json_lists.NO_JSON, msgspec.ValidationError):
            raise BadMetadata("what the API says of its model is no metadata of it. Check the URL.") from None
        return self.knowing(said.inputs, said.outputs)

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode the inputs as the elements of one tensor."""
        data, wished = packed(inputs), sent_parameters(parameters)
        size = {"binary_data_size": len(data)}
        head: dict[str, Any] = {
            "inputs": [{"name": self.input, "shape": self.shape(len(inputs)), "datatype": BYTES, "parameters": size}]
        }
        if self.output:
            head["outputs"] = [{"name": self.output, "parameters": {"binary_data": True}}]
        else:
            wished[BINARY_OUTPUT] = True
        if wished:
            head["parameters"] = wished
        text = msgspec.json.encode(head)
        fields = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
        return RemoteCall(text + data, fields)

    def decode(self, body: bytes | bytearray, expected: int, json_bytes: int = -1) -> list[ItemResult]:
        """Read the elements or rows of the output, one for each input."""
        if json_bytes < 0:
            raise NoOutputs("no binary data, which it was asked for")
        if json_bytes > len(body):
            raise NoOutputs(f"{len(body)} bytes, of which {json_bytes} are to be JSON")
        octets = memoryview(body)
        tensor, used = _tensor_in(octets[:json_bytes])
        self.check_output(tensor.name, tensor.datatype, tensor.shape, expected)
        data, size = octets[json_bytes:], tensor.parameters.binary_data_size
        if size != len(data):
            raise NoOutputs(f"{len(data)} bytes of binary data, and it says {'nothing' if size is None else size}")
        return with_tokens(binary_items(tensor.datatype, tensor.shape, data), used)


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
    shape: Annotated[list[Int64], msgspec.Meta(max_length=MOST_DIMENSIONS)]
    parameters: _Parameters = _Parameters()


class _Answer(msgspec.Struct, gc=False):
    outputs: tuple[msgspec.Raw]
    parameters: msgspec.Raw = msgspec.Raw(b"")


class _Used(msgspec.Struct, gc=False):
    tokens_used: int = 0


_decode_used: Any = msgspec.json.Decoder(_Used).decode
_decode_index: Any = msgspec.json.Decoder(list[_Named]).decode
_decode_metadata: Any = msgspec.json.Decoder(_Metadata).decode
_decode_answer: Any = msgspec.json.Decoder(_Answer).decode
_decode_tensor: Any = msgspec.json.Decoder(_Tensor).decode


def _tensor_in(text: memoryview) -> tuple[_Tensor, int]:
    """The only output of an answer, and the tokens that its parameters tell, 0 for none."""
    try:
        answer = _decode_answer(text)
        [raw] = answer.outputs
    except msgspec.ValidationError:
        raise NoOutputs("no object with one member in its outputs") from None
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is no JSON ({exc})") from None
    try:
        found: _Tensor = _decode_tensor(raw)
    except msgspec.ValidationError:
        raise NoOutputs("an output that is no tensor") from None
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is no JSON ({exc})") from None
    return found, _tokens_in(answer.parameters)


def _tokens_in(parameters: msgspec.Raw) -> int:
    try:
        return int(_decode_used(parameters).tokens_used)
    except json_lists.NO_JSON:
        return 0
