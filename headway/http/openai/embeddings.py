"""Codec of POST /v1/embeddings. Each input becomes an entry. An output is a list of numbers or a tensor with one axis."""

from __future__ import annotations

import struct
from binascii import b2a_base64
from collections.abc import Iterator, Sequence

import msgspec

from headway.config import Settings
from headway.core import failures, tensor_json
from headway.core.tensors import SIZES, NoTensors, Tensor, shown_shape, unpack
from headway.core.values import octets
from headway.doors.answer_pieces import released
from headway.doors.bodies import check_text
from headway.doors.exchange import JSON, Exchange, Outcome, Reader, Written
from headway.errors import BACKEND_ERROR, BadRequest, RequestError
from headway.gateway.served_models import KnownModels
from headway.http.openai.members import (
    MOST_TEXTS,
    drop_user,
    long_reader,
    parameters_reader,
    read_members,
    take_inputs,
    take_number,
    take_text,
)
from headway.model import RequestOptions, Tensors, TokenCount, Value

FLOAT, BASE64 = "float", "base64"


class _RichEmbedding(msgspec.Struct, gc=False):
    embedding: list[float]
    prompt_tokens: int = 0


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    total_tokens: int


class _Embedding(msgspec.Struct, gc=False):
    object: str
    index: int
    embedding: list[float] | str | msgspec.Raw


_encode = msgspec.json.Encoder().encode
_numbers = msgspec.json.Decoder(list[float]).decode
_rich_embedding = msgspec.json.Decoder(_RichEmbedding).decode


def embeddings_reader(settings: Settings) -> Reader:
    """Return the reader of request bodies."""
    limit = min(MOST_TEXTS, settings.max_queue)
    parameters = parameters_reader(settings)

    def make(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        members = read_members(body)
        model = take_text(members, "model")
        name = model or known.default
        inputs = take_inputs(members, "input", limit, check_text)
        encoding = take_text(members, "encoding_format") or FLOAT
        if encoding not in (FLOAT, BASE64):
            raise BadRequest(f"expected `{FLOAT}` or `{BASE64}` - at `$.encoding_format`")
        raw = members.get("dimensions")
        dimensions = take_number(members, "dimensions")
        if raw is not None and dimensions is not None:
            members["dimensions"] = raw  # Models that can shorten their embeddings get it as a parameter.
        if "user" in members:
            drop_user(members, known[name])
        write = _Writer(name, encoding == BASE64, dimensions)
        input: Value | list[Value] = inputs[0] if len(inputs) == 1 else [*inputs]
        return Exchange(model, input, parameters(members), options, write)

    return Reader(make, long_reader(make, settings, "input"))


class _Writer(msgspec.Struct, frozen=True):
    """Writes the answer to one request. If `packed`, embeddings are base64 of float32 numbers. `dimensions` may be None."""

    model: str
    packed: bool
    dimensions: int | None

    def __call__(self, outcome: Outcome) -> Written:
        return JSON, self._pieces(outcome.outputs, outcome.tokens)

    def _pieces(self, outputs: Sequence[Value], reported: Sequence[TokenCount | None]) -> Iterator[bytes]:
        yield b'{"object":"list","data":['
        tokens, inputs = 0, len(outputs)
        for index, output in enumerate(released(outputs)):
            embedding: list[float] | str | msgspec.Raw
            if isinstance(output, Tensors):
                count, counted, embedding = self._of_tensors(output, index, inputs)
            else:
                numbers, counted = _read(output)
                count, embedding = len(numbers), _packed(numbers) if self.packed else numbers
            if self.dimensions is not None and self.dimensions != count:
                raise BadRequest(
                    f"the model returns {count} numbers, not {self.dimensions}; leave this out - at `$.dimensions`"
                )
            yield b"," if index else b""
            yield _encode(_Embedding("embedding", index, embedding))
            used = None if counted else reported[index]
            tokens += counted if used is None else used.used
        yield b'],"model":%b,"usage":%b}' % (_encode(self.model), _encode(_Usage(tokens, tokens)))

    def _of_tensors(self, output: Tensors, position: int, inputs: int) -> tuple[int, int, str | msgspec.Raw]:
        """Return an embedding's dimension, a token count of 0, and the embedding in its encoding. Raises RequestError."""
        try:
            tensor = _one_embedding(output)
            if self.packed:
                packed = b2a_base64(tensor_json.as_fp32(tensor), newline=False).decode("ascii")
                return tensor.head.shape[1], 0, packed
        except NoTensors as exc:
            raise RequestError(str(exc), code=BACKEND_ERROR, reason="output") from None
        try:
            return tensor.head.shape[1], 0, msgspec.Raw(b"".join(tensor_json.nested(tensor, single=True)))
        except NoTensors as exc:
            error = failures.no_json(exc, ", with encoding_format base64")
            message = failures.at_input(position, inputs, error.message) if inputs > 1 else error.message
            raise RequestError(message, code=error.code, reason=error.reason) from None


def _read(output: Value) -> tuple[list[float], int]:
    text = octets(output)
    if isinstance(output, str) and text.lstrip()[:1] not in (b"[", b"{"):
        raise BadRequest("the model returns text, not embeddings (lists of numbers); request a completion instead")
    try:
        if text.lstrip()[:1] == b"{":
            rich = _rich_embedding(text)
            numbers, tokens = rich.embedding, rich.prompt_tokens
        else:
            numbers, tokens = _numbers(text), 0
    except (msgspec.MsgspecError, RecursionError) as exc:
        message = f"the model's output is not an embedding (a list of numbers, or its JSON text): {exc}"
        raise RequestError(message, code=BACKEND_ERROR, reason="output") from None
    if not numbers:
        raise RequestError("the model's output is an embedding without numbers", code=BACKEND_ERROR, reason="output")
    return numbers, tokens


def _packed(numbers: list[float]) -> str:
    try:
        return b2a_base64(struct.pack(f"<{len(numbers)}f", *numbers), newline=False).decode("ascii")
    except OverflowError:
        message = "the model's output contains a number that does not fit into four bytes; set encoding_format to float"
        raise RequestError(message, code=BACKEND_ERROR, reason="output") from None


def _one_embedding(output: Tensors) -> Tensor:
    tensors = unpack(output)
    head = tensors[0].head if tensors else None
    if head is None or len(tensors) != 1:
        raise NoTensors(f"the model returned {len(tensors)} tensors; an embedding must be a single tensor")
    if len(head.shape) != 2 or head.shape[0] != 1 or not head.shape[1] or not SIZES[head.datatype]:
        shape = shown_shape(head.shape[1:] if head.shape[0] == 1 else head.shape)
        raise NoTensors(f"the model's output is {head.datatype} of shape {shape}; an embedding has one axis of numbers")
    return tensors[0]
