"""Answers to inference requests, in JSON or with binary data, and error answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from headway.core.tensors import BYTES, opening_of
from headway.doors.answer_pieces import PIECE, array_within, cut, packed_pieces, released, text_pieces
from headway.doors.exchange import JSON, Outcome, Written
from headway.errors import SHOWN, AnyError, BadRequest
from headway.http.problem import Encoded, escaped, problem_header
from headway.model import Tensors, Value, ValueKind, added_up
from headway.oip.model_tensors import OutputTensor, WantedOutput, answer_tensors, are_tensors, form_of_output
from headway.oip.rest.bodies import LENGTH_FIELD
from headway.oip.tensors import OUTPUT, check_outputs, element_of, head_of, packed_size

_BINARY = f"content-type: application/octet-stream\r\n{LENGTH_FIELD.lower()}: %d\r\n".encode()
CODE_FIELD = "x-headway-error"  # Header field with the error code, which the protocol's error body has no member for.
_TEXT, _UNSET = ValueKind.TEXT, msgspec.UNSET
_Unset = msgspec.UnsetType
_SMALL = 1 << 13  # Maximum size in bytes of numbers that are converted to JSON in one go.
_LARGEST = 10**12  # Placeholder for an unknown size. No size has more digits.


class _DataSize(msgspec.Struct, gc=False):
    binary_data_size: int


class _Tensor(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _DataSize | _Unset = _UNSET
    data: tuple[str, ...] | msgspec.Raw | _Unset = _UNSET


class _Used(msgspec.Struct, gc=False):
    tokens_used: int


class _Answer(msgspec.Struct, gc=False):
    model_name: str
    model_version: str
    outputs: tuple[_Tensor, ...]
    id: str | _Unset = _UNSET
    parameters: _Used | _Unset = _UNSET


_Tokens = _Used | _Unset
_Size = _DataSize | _Unset
_encode = msgspec.json.Encoder().encode


class Answerer(msgspec.Struct, frozen=True, gc=False):
    """Writes the answer to one request. `shape` is the shape of the input, and also of the output. `gives` is the kind of value that
    the model returns, or None if unknown. `wanted` has the requested tensors; empty means all."""

    model: str
    shape: tuple[int, ...] = (1,)
    binary: bool = False
    gives: ValueKind | None = None
    id: str | None = None
    wanted: tuple[WantedOutput, ...] = ()

    def write(self, outcome: Outcome) -> Written:
        outputs, version, used = outcome.outputs, outcome.version, added_up(outcome.tokens)
        tokens = msgspec.UNSET if used is None else _Used(used.used)
        if len(outputs) == 1 and len(outputs[0]) <= PIECE:
            return self._one(version, tokens, outputs[0])
        if are_tensors(outputs):
            return self._tensors(version, tokens, outputs)
        self._check_names()
        if self.binary:
            length = len(self._encode(version, tokens, parameters=_DataSize(_LARGEST)))
            return _BINARY % length, self._packed(version, tokens, outputs, length)
        document = self._encode(version, tokens, data=())
        return JSON, array_within(document, "data", map(text_pieces, self._texts(outputs)))

    def _one(self, version: str, tokens: _Tokens, output: Value) -> Written:
        gives = self.gives
        if isinstance(output, str) and not self.binary and (gives is _TEXT or (gives is None and not self.wanted)):
            return JSON, self._document(version, tokens, (_Tensor(OUTPUT, BYTES, self.shape, _UNSET, (output,)),))
        if isinstance(output, Tensors):
            return self._tensors(version, tokens, (output,))
        self._check_names()
        if not self.binary:
            return JSON, self._encode(version, tokens, data=(next(self._texts((output,))),))
        element = element_of(output, self.gives)
        document = self._encode(version, tokens, _DataSize(packed_size((element,))))
        return _BINARY % len(document), b"%b%b%b" % (document, head_of(element), element)

    def _tensors(self, version: str, tokens: _Tokens, outputs: Sequence[Tensors]) -> Written:
        if len(outputs) == 1 and self.id is None and tokens is _UNSET and (self.binary or self.wanted):
            content = outputs[0].content
            form = _answer_form(self.model, version, self.wanted, self.binary, opening_of(content))
            if form is not None and form.length == len(content):
                return form.fields, b"".join([form.document, *map(content.__getitem__, form.places)])
        tensors = answer_tensors(outputs, self.wanted, binary=self.binary)
        binary = [tensor for tensor in tensors if tensor.binary]
        if len(binary) == len(tensors):
            document = self._document(version, tokens, tuple(map(_sized, tensors)))
            head = _BINARY % len(document)
            if sum(tensor.size for tensor in tensors) > PIECE:
                return head, _with_data(document, tensors)
            return head, b"".join([document, *(part for tensor in tensors for part in tensor.parts)])
        if not binary and sum(tensor.size for tensor in tensors) <= _SMALL:
            return JSON, self._document(version, tokens, tuple(map(_with_json, tensors)))
        pieces = array_within(self._document(version, tokens, ()), "outputs", map(_described, tensors))
        if not binary:
            return JSON, pieces
        document = b"".join(pieces)  # Its length is in the header.
        return _BINARY % len(document), _with_data(document, binary)

    def _check_names(self) -> None:
        """Check the requested outputs, unless this was done when the request was read. Raises BadRequest."""
        if self.gives is None:
            check_outputs([output.name for output in self.wanted])

    def _encode(
        self, version: str, tokens: _Tokens, parameters: _Size = _UNSET, data: tuple[str, ...] | _Unset = _UNSET
    ) -> bytes:
        return self._document(version, tokens, (_Tensor(OUTPUT, BYTES, self.shape, parameters, data),))

    def _document(self, version: str, tokens: _Tokens, outputs: tuple[_Tensor, ...]) -> bytes:
        id = msgspec.UNSET if self.id is None else self.id
        return _encode(_Answer(self.model, version, outputs, id, tokens))

    def _packed(self, version: str, tokens: _Tokens, outputs: Sequence[Value], length: int) -> Iterator[bytes]:
        """Yield the JSON object and the data. The object is padded to the announced length of `length` bytes."""
        elements: list[bytes] = []
        for output in released(outputs):
            elements.append(element_of(output, self.gives))
            yield b""
        yield self._encode(version, tokens, parameters=_DataSize(packed_size(elements))).ljust(length)
        yield from packed_pieces(elements)

    def _texts(self, outputs: Sequence[Value]) -> Iterator[str]:
        for index, output in enumerate(released(outputs)):
            if isinstance(output, str) and (self.gives is _TEXT or self.gives is None):
                yield output
                continue
            try:
                yield element_of(output, self.gives).decode()
            except UnicodeDecodeError:
                raise BadRequest(
                    f"output {index} is not UTF-8, so JSON cannot represent it; request `binary_data`"
                ) from None


def _sized(tensor: OutputTensor) -> _Tensor:
    return _Tensor(tensor.head.name, tensor.head.datatype, tensor.head.shape, _DataSize(tensor.size))


def _with_json(tensor: OutputTensor) -> _Tensor:
    head, data = tensor.head, msgspec.Raw(b"".join(tensor.json_pieces()))
    return _Tensor(head.name, head.datatype, head.shape, msgspec.UNSET, data)


def _described(tensor: OutputTensor) -> Iterator[bytes]:
    if tensor.binary:
        yield _encode(_sized(tensor))
        return
    head = tensor.head
    yield _encode(_Tensor(head.name, head.datatype, head.shape))[:-1] + b',"data":'
    yield from tensor.json_pieces()
    yield b"}"


def _with_data(document: bytes, tensors: Iterable[OutputTensor]) -> Iterator[bytes]:
    yield document
    for tensor in tensors:
        for part in tensor.parts:
            yield from cut(part)


class _Form(NamedTuple):
    """The form of a small binary answer. `places` says where its data are in the output's value, which has `length` bytes."""

    fields: bytes
    document: bytes
    places: Sequence[slice]
    length: int


@lru_cache(maxsize=256)
def _answer_form(
    model: str, version: str, wanted: tuple[WantedOutput, ...], binary: bool, opening: bytes
) -> _Form | None:
    form = form_of_output(opening, wanted, binary=binary, max_bytes=PIECE)
    if form is None or not all(tensor.binary for tensor in form.tensors):
        return None
    document = _encode(_Answer(model, version, tuple(map(_sized, form.tensors))))
    return _Form(_BINARY % len(document), document, form.places, form.length)


class _Error(msgspec.Struct, gc=False):
    error: str


def encode_error(error: AnyError, shown: str) -> Encoded:
    """Encode an error in the protocol's format; see `headway.http.problem.EncodeError`."""
    code = SHOWN.get(error.code, error.code)
    fields = problem_header(error) | {"content-type": "application/json", CODE_FIELD: code}
    try:
        return fields, _encode(_Error(error.message))
    except UnicodeEncodeError:
        return fields, _encode(_Error(escaped(error.message)))
