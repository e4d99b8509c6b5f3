"""The dialect `oip-grpc`: the Open Inference Protocol over gRPC (`ModelInfer` with raw contents).

The URL is grpc://HOST:PORT/NAME, or grpcs://… for TLS. Outputs may be in raw or typed contents. Protobuf is imported inside functions,
because it requires the extra `grpc` and only this dialect uses it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

import msgspec

from headway.core.excerpt import excerpt
from headway.core.tensors import BYTES, MOST_AXES, MOST_TENSORS, Tensor, TensorHead, join_elements
from headway.dialects.dialect import BadMetadata, NoOutputs, NotSendable, Remote, RemoteCall, with_tokens
from headway.errors import SettingError
from headway.model import ItemResult, Value, ValueKind
from headway.oip.dialect import TensorDialect, element_items, sent_parameters
from headway.oip.metadata import TensorMetadata
from headway.oip.parameters import TOKENS
from headway.oip.tensors import CONTENTS

_PATH = re.compile("/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/?")
_INT64, _UINT64 = 1 << 63, 1 << 64


class OpenInferenceGrpc(TensorDialect, frozen=True, kw_only=True):
    """The dialect `oip-grpc`, for the remote model `model`. If `version` is empty, the server chooses."""

    schemes: ClassVar[tuple[str, ...]] = ("grpc", "grpcs")
    model: str
    version: str = ""

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Accept a URL whose path names the model or, if `model` is set, a URL without a path."""
        parts = urlsplit(url)
        if parts.port is None:
            raise SettingError("target", parts.netloc, "has no port", "Write grpc://host:8001/NAME.")
        if parts.query or parts.fragment:
            hint = "Leave it out; credentials are set by remote_headers_file or remote_token."
            raise SettingError("target", "…", "is a gRPC URL with a query", hint)
        match = _PATH.fullmatch(parts.path)
        if match is None and parts.path not in ("", "/"):
            hint = "Write grpc://host:8001/NAME, or grpc://host:8001/NAME/versions/VERSION."
            raise SettingError("target", parts.path, "does not name a model", hint)
        named = unquote(match["name"]) if match is not None else ""
        if not named and not model:
            hint = "Write grpc://host:8001/NAME, or set it to the remote model's name."
            raise SettingError("remote_model", model, "is empty, and the URL does not name a model", hint)
        if named and model and named != model:
            hint = "Leave it out, or name the model in one of them."
            raise SettingError("remote_model", model, "is not the model that the URL names", hint)
        version = unquote(match["version"] or "") if match is not None else ""
        dialect = cls(model=named or model, version=version)
        named = _messages("ModelMetadata")[0](name=dialect.model, version=version)
        metadata = RemoteCall(bytes(named.SerializeToString()), {}, _method("ModelMetadata"))
        return Remote(url, dialect, metadata, RemoteCall(b"", {}, _method("RepositoryIndex")), dialect.model)

    def models(self, answer: bytes | bytearray) -> list[str]:
        try:
            return [model.name for model in _messages("RepositoryIndex")[1].FromString(bytes(answer)).models]
        except _decode_error():
            return []

    def learn(self, metadata: bytes | bytearray) -> Self:
        try:
            declared = _messages("ModelMetadata")[1].FromString(bytes(metadata))
        except _decode_error():
            raise BadMetadata("the API's answer is not the metadata of a model. Check the URL.") from None
        return self.adapted(_tensors(declared.inputs), _tensors(declared.outputs))

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        request = _messages("ModelInfer")[0](model_name=self.model, model_version=self.version)
        for tensor in self.sent(inputs):
            request.inputs.add(name=tensor.head.name, datatype=tensor.head.datatype, shape=tensor.head.shape)
            request.raw_input_contents.append(b"".join(tensor.data))
        for name in self.output_names:
            request.outputs.add(name=name)
        for name, raw in sent_parameters(parameters).items():
            member, value = _parameter(name, msgspec.json.decode(raw))
            setattr(request.parameters[name], member, value)
        return RemoteCall(request.SerializeToString(), {}, _method("ModelInfer"))

    def decode(
        self, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
    ) -> list[ItemResult]:
        try:
            answer = _messages("ModelInfer")[1].FromString(bytes(body))
        except _decode_error():
            raise NoOutputs("something that is not a ModelInfer message") from None
        used = answer.parameters[TOKENS].int64_param if TOKENS in answer.parameters else 0
        return with_tokens(self._items(answer, expected, rows), used)

    def _items(self, answer: Any, expected: int, rows: Sequence[int]) -> list[ItemResult]:
        outputs, raw = answer.outputs, answer.raw_output_contents
        if self.signature.gives is ValueKind.TEXT and len(outputs) != 1:
            raise NoOutputs(f"{len(outputs)} tensors, expected one")
        if not 0 < len(outputs) <= MOST_TENSORS:
            raise NoOutputs(f"{len(outputs)} tensors, expected 1 to {MOST_TENSORS}")
        heads = [TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape[: MOST_AXES + 1])) for tensor in outputs]
        places = self.check_outputs(heads, expected, rows)
        if raw and len(raw) != len(outputs):
            raise NoOutputs(
                f"{len(raw)} raw contents for {'one tensor' if len(outputs) == 1 else f'{len(outputs)} tensors'}"
            )
        if not raw and self.signature.gives is ValueKind.TEXT:
            elements = outputs[0].contents.bytes_contents
            if len(elements) != expected:
                raise NoOutputs(f"{len(elements)} outputs for {expected} inputs")
            return element_items(elements)
        tensors = [
            Tensor(
                heads[place], memoryview(raw[place]) if raw else _typed(outputs[place].contents, heads[place].datatype)
            )
            for place in places
        ]
        return self.results(tensors, expected, rows)


def _method(name: str) -> str:
    return f"/inference.GRPCInferenceService/{name}"


@cache
def _messages(method: str) -> tuple[Any, Any]:
    from headway import protos

    return protos.message_classes(protos.OPEN_INFERENCE, method)


def _decode_error() -> type[Exception]:
    from google.protobuf.message import DecodeError

    error: type[Exception] = DecodeError
    return error


def _tensors(declared: Any) -> list[TensorMetadata]:
    return [TensorMetadata(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in declared]


def _typed(contents: Any, datatype: str) -> bytes:
    if datatype == BYTES:
        return join_elements(contents.bytes_contents)
    if datatype not in CONTENTS:  # FP16 and BF16 have no typed contents.
        return b""
    member, code = CONTENTS[datatype]
    try:
        return array(code, getattr(contents, member)).tobytes()
    except OverflowError:
        raise NoOutputs(f"a number that is out of the range of {datatype}") from None


def _parameter(name: str, value: Any) -> tuple[str, Any]:
    """Return the member of a parameter message that takes this value, and the value. Raises NotSendable."""
    if isinstance(value, bool):
        return "bool_param", value
    if isinstance(value, int) and -_INT64 <= value < _UINT64:
        return "int64_param" if value < _INT64 else "uint64_param", value
    if isinstance(value, float):
        return "double_param", value
    if isinstance(value, str):
        return "string_param", value
    raise NotSendable(
        f"the parameter `{excerpt(name)}` cannot be sent to the remote API: over gRPC a parameter must be a boolean, a string, "
        "or a number of at most 64 bits"
    )
