"""Dialect `oip`: the Open Inference Protocol over HTTP, `POST /v2/models/NAME/infer`, with binary tensor data both ways.

A body is a JSON object, as long as the field Inference-Header-Content-Length says, and the data of each tensor after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headway.core.tensors import BYTES, MOST_TENSORS, Tensor, TensorHead
from headway.dialects import json_lists
from headway.dialects.dialect import JSON_BODY, BadMetadata, NoOutputs, Remote, RemoteCall
from headway.dialects.json_lists import with_tokens
from headway.errors import SettingError
from headway.model import ItemResult, Value, ValueKind
from headway.oip.dialect import MOST_DIMENSIONS, TensorDialect, sent_parameters
from headway.oip.metadata import Int64, TensorMetadata
from headway.oip.parameters import BINARY_OUTPUT

_INFER = re.compile("(?P<model>.*/v2/models/(?P<name>[^/]+)(?:/versions/[^/]+)?)/infer")
_LIGHT = 1 << 20
"""Bytes of JSON up to which an answer in binary form is light to read."""
_NO_FIELDS: MappingProxyType[str, str] = MappingProxyType({})


class OpenInferenceHttp(TensorDialect, frozen=True):
    """Texts or tensors in, and out."""

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
        """Encode the inputs as the elements of one tensor, or as the rows of the model's."""
        sent, wished = self.sent(inputs), sent_parameters(parameters)
        head: dict[str, Any] = {
            "inputs": [
                {
                    "name": one.head.name,
                    "shape": one.head.shape,
                    "datatype": one.head.datatype,
                    "parameters": {"binary_data_size": one.size},
                }
                for one in sent
            ]
        }
        if names := self.output_names:
            head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in names]
        else:
            wished[BINARY_OUTPUT] = True
        if wished:
            head["parameters"] = wished
        text = msgspec.json.encode(head)
        fields = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
        return RemoteCall(b"".join([text, *(piece for one in sent for piece in one.data)]), fields)

    def decode(
        self, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
    ) -> list[ItemResult]:
        """Read the elements or rows of the outputs, those of each input."""
        if json_bytes < 0:
            raise NoOutputs("no binary data, which it was asked for")
        if json_bytes > len(body):
            raise NoOutputs(f"{len(body)} bytes, of which {json_bytes} are to be JSON")
        octets = memoryview(body)
        found, used = _tensors_in(octets[:json_bytes], several=self.signature.gives is ValueKind.TENSORS)
        heads = [TensorHead(one.name, one.datatype, tuple(one.shape)) for one in found]
        places = self.check_outputs(heads, expected, rows)
        data = _binary_data(octets[json_bytes:], [one.parameters.binary_data_size for one in found])
        tensors = [Tensor(heads[place], data[place]) for place in places]
        return with_tokens(self.results(tensors, expected, rows), used)

    def is_light(self, json_bytes: int) -> bool:
        """Tensors of numbers are only copied."""
        signature = self.signature
        numbers = bool(self.outputs) and all(one.datatype != BYTES for one in self.outputs)
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
    shape: Annotated[list[Int64], msgspec.Meta(max_length=MOST_DIMENSIONS)]
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


def _tensors_in(text: memoryview, *, several: bool) -> tuple[list[_Tensor], int]:
    """Outputs of an answer, of which there may be `several` or is one, and the tokens that its parameters tell, 0 for none."""
    wrong = "no object with one member in its outputs"
    try:
        answer = _decode_answer(text)
        if len(answer.outputs) > 1 and not several:
            raise NoOutputs(wrong)
    except msgspec.ValidationError:
        raise NoOutputs(f"no object with 1 to {MOST_TENSORS} members in its outputs" if several else wrong) from None
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None
    try:
        found = [_decode_tensor(raw) for raw in answer.outputs]
    except msgspec.ValidationError:
        raise NoOutputs("an output that is no tensor") from None
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is not JSON ({exc})") from None
    return found, _tokens_in(answer.parameters)


def _binary_data(octets: memoryview, sizes: Sequence[int | None]) -> list[memoryview]:
    """Binary data of each output. Raises NoOutputs where they are others than the outputs say."""
    if None in sizes:
        raise NoOutputs(f"{len(octets)} bytes of binary data, and it says nothing of an output's")
    known = [size for size in sizes if size is not None]
    if min(known) < 0 or sum(known) != len(octets):
        raise NoOutputs(f"{len(octets)} bytes of binary data, and it says {sum(known)}")
    ends = list(accumulate(known))
    return [octets[end - size : end] for size, end in zip(known, ends, strict=True)]


def _tokens_in(parameters: msgspec.Raw) -> int:
    try:
        return int(_decode_used(parameters).tokens_used)
    except json_lists.NO_JSON:
        return 0
