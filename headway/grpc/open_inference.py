"""The Open Inference Protocol over gRPC: inference, by calls and by streams, and what is said of the server and its models.

An input comes in `contents` or in `raw_input_contents`; an output leaves in `raw_output_contents`. What is said of a model is
for principals that may ask it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgspec

from headway.config import Settings
from headway.core.excerpt import excerpt
from headway.core.failures import error_of
from headway.errors import NO_WORKERS, NOT_FOUND, NOT_IMPLEMENTED, BadRequest, RequestError
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.limiter import Limiter
from headway.gateway.served_models import KnownModels
from headway.grpc import messages
from headway.grpc.calls import PortContext
from headway.http.inference.answer_pieces import PIECE, packed_pieces, released
from headway.http.inference.bodies import value_checker
from headway.http.inference.exchange import Exchange, Outcome, ReadRequest, Written
from headway.http.oip.infer import check_version, with_version
from headway.http.oip.models import ShownModels
from headway.http.oip.requests import InferRequest
from headway.model import Principal, RequestOptions, added_up
from headway.oip import elements, metadata, parameters, tensors
from headway.oip.tensors import BYTES, OUTPUT

_REQUEST = messages.message("inference.ModelInferRequest")
_RESPONSE = messages.message("inference.ModelInferResponse")
_CONTENT = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | 2,))
"""Byte before the length of the content of a tensor."""
_OTHER_CONTENTS = tuple(
    field.name
    for field in messages.message("inference.InferTensorContents").DESCRIPTOR.fields
    if field.name != "bytes_contents"
)


def infer_reader(settings: Settings) -> ReadRequest:
    """Make the reader of the messages of ModelInfer and ModelStreamInfer.

    Arguments:
        settings: bounds of inputs and parameters, tiers, and the default model.
    """
    most, tiers, check = min(MOST_INPUTS, settings.max_queue), len(settings.tier_names), value_checker(settings)

    def read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
        asked = messages.read(_REQUEST, body)
        model = asked.model_name or known.default
        check_version(known, model, asked.model_version or None)
        options = with_version(options, asked.model_version)
        shape, found = _input_of(asked, most)
        if asked.outputs:
            tensors.check_outputs([one.name for one in asked.outputs])
        wishes, text = parameters.NONE, b""
        if asked.parameters:
            given = _parameters_of(asked.parameters, settings.max_parameters)
            wishes, rest = parameters.read_wishes(given, tiers), parameters.for_target(given)
            text = msgspec.json.encode(rest) if rest else b""
        id = asked.id

        def write(outcome: Outcome) -> Written:
            gives = known[model].gives
            answer = _RESPONSE(model_name=model, model_version=outcome.version, id=id)
            answer.outputs.add(name=OUTPUT, datatype=BYTES, shape=shape)
            if (used := added_up(outcome.tokens)) is not None:
                answer.parameters[parameters.TOKENS].int64_param = used.used
            head, outputs = answer.SerializeToString(), outcome.outputs
            if len(outputs) > 1 or len(outputs[0]) > PIECE:
                return b"", _pieces(head, (elements.element_of(one, gives) for one in released(outputs)))
            one = elements.element_of(outputs[0], gives)
            return b"", b"".join(
                (head, _CONTENT, messages.varint(tensors.packed_size((one,))), tensors.head_of(one), one)
            )

        request = InferRequest(id, shape, found, wishes, text)
        return request.exchange(model, options, known[model].takes, check, write)

    return read


def _pieces(answer: bytes, outputs: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of the message of an answer, of which `answer` is all but the content of its tensor."""
    packed: list[bytes] = []
    for one in outputs:
        packed.append(one)
        yield b""
    yield answer
    yield _CONTENT + messages.varint(tensors.packed_size(packed))
    yield from packed_pieces(packed)


def _input_of(asked: Any, most: int) -> tuple[tuple[int, ...], list[elements.Element]]:
    """Shape and elements of the only input of a request. Raises BadRequest."""
    if len(asked.inputs) != 1:
        raise tensors.wrong_number(len(asked.inputs))
    tensor, raw = asked.inputs[0], asked.raw_input_contents
    for one in (tensor, *asked.outputs):
        if "shared_memory_region" in one.parameters:
            raise BadRequest("shared memory is not served here; send the data of the input in the message")
    for one in asked.outputs:
        if "classification" in one.parameters:
            raise BadRequest("classification is not served here; leave the parameter out")
    shape = tuple(tensor.shape)
    count = tensors.count_elements(tensor.name, tensor.datatype, shape, most)
    if raw:
        if tensor.HasField("contents"):
            raise BadRequest("the input has both `contents` and `raw_input_contents`; expected one of them")
        if len(raw) != 1:
            raise BadRequest(f"`raw_input_contents` has {len(raw)} members for one input; expected one")
        return shape, [*tensors.unpack(tensor.name, raw[0], count)]
    for name in _OTHER_CONTENTS:
        if getattr(tensor.contents, name):
            raise BadRequest(f"the input has `{name}`; expected `bytes_contents`, as its datatype is {BYTES}")
    found = tensor.contents.bytes_contents
    if len(found) != count:
        raise BadRequest(f"`bytes_contents` has {len(found)} elements, and the shape says {count}")
    return shape, list(found)


def _parameters_of(given: Any, most: int) -> dict[str, Any]:
    """Parameters of a request as Python values. Raises BadRequest."""
    if len(given) > most:
        raise BadRequest(f"`parameters` has {len(given)} members; at most {most} are taken")
    found: dict[str, Any] = {}
    for name, one in given.items():
        kind = one.WhichOneof("parameter_choice")
        value = getattr(one, kind) if kind is not None else None
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"the parameter `{excerpt(name)}` is no finite number")
        found[name] = value
    return found


_NOT_THERE = (NOT_FOUND, NO_WORKERS)
"""Codes of a model or version that is not served, or of which that is not known now: who waits for it asks until it is ready."""

Answer = Callable[[Any, Principal], Awaitable[Any]]
"""Request message, and its principal, to the answer's members. Raises RequestError."""


class OpenInference:
    """Methods of the protocol but for inference.

    Arguments:
        port: context of the port.
        ready: whether this process should get traffic.
    """

    def __init__(self, port: PortContext, ready: Callable[[], Awaitable[bool]]) -> None:
        self._models = ShownModels(port.gateway, port.admission.anonymous, ready)

    @property
    def for_everybody(self) -> dict[str, Answer]:
        """Methods that need no credential, by name."""
        return {"ServerLive": self._live, "ServerReady": self._server_ready, "ServerMetadata": self._server}

    @property
    def for_principals(self) -> dict[str, Answer]:
        """Methods for known principals, by name."""
        return {
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._never,
            "RepositoryModelUnload": self._never,
        }

    async def _live(self, asked: Any, principal: Principal) -> Any:
        return {"live": True}

    async def _server_ready(self, asked: Any, principal: Principal) -> Any:
        return {"ready": await self._models.ready()}

    async def _server(self, asked: Any, principal: Principal) -> Any:
        return metadata.ServerMetadata()

    async def _model_ready(self, asked: Any, principal: Principal) -> Any:
        try:
            model = self._find(asked, principal)
        except RequestError as exc:
            if exc.code in _NOT_THERE:
                return {"ready": False}
            raise
        return {"ready": await self._models.is_ready(model)}

    async def _model(self, asked: Any, principal: Principal) -> Any:
        return self._models.metadata(self._find(asked, principal))

    async def _config(self, asked: Any, principal: Principal) -> Any:
        return {"config": self._models.config(self._find(asked, principal))}

    async def _statistics(self, asked: Any, principal: Principal) -> Any:
        model = self._find(asked, principal) if asked.name else ""
        return {"model_stats": self._models.statistics(principal, model)}

    async def _index(self, asked: Any, principal: Principal) -> Any:
        return {"models": await self._models.index(principal, only_ready=asked.ready)}

    async def _never(self, asked: Any, principal: Principal) -> Any:
        message = "models are not loaded and unloaded by clients; start a worker for a model, and it is served"
        raise RequestError(message, code=NOT_IMPLEMENTED)

    def _find(self, asked: Any, principal: Principal) -> str:
        """Model that a message names. Raises RequestError when it is none that the principal may ask."""
        return self._models.find(asked.name, asked.version or None, principal)


def responder(
    method: str, answer: Answer, limiter: Limiter | None = None
) -> Callable[[bytes, Principal], Awaitable[bytes]]:
    """Make the function from a method's message to the message of its answer. `limiter`: limiter for which the call is a poll."""
    request, response = messages.kinds_of(messages.OPEN_INFERENCE, method)

    async def respond(body: bytes, principal: Principal) -> bytes:
        if limiter is not None and (over := limiter.poll(principal.limits)) is not None:
            raise error_of(over)
        found = await answer(messages.read(request, body), principal)
        return bytes(response(**msgspec.to_builtins(found)).SerializeToString())

    return respond
