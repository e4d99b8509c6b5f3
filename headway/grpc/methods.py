"""The methods of the port, the calls that answer them, and the port's own services: health and reflection."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from headway import protos
from headway.core import tensor_json, values
from headway.core.excerpt import excerpt
from headway.core.failures import error_of, no_json
from headway.core.json_pages import SHORT, Steps, finish
from headway.core.tensors import NoTensors
from headway.doors.answer_pieces import is_large
from headway.doors.bodies import read_text, to_tensors_in_steps
from headway.doors.exchange import Exchange, Outcome, Reader, Written
from headway.doors.fields import ID_PREFIX
from headway.doors.readiness import AGE, CachedReadiness
from headway.errors import NO_WORKERS, NOT_FOUND, NOT_IMPLEMENTED, BadRequest, NotFound, RequestError
from headway.gateway.limiter import Limiter
from headway.gateway.served_models import KnownModels
from headway.grpc.call_stream import CallStream, to_be_opened_anew
from headway.grpc.calls import PlainCall, PortContext, StreamCall
from headway.grpc.connection import MakeCall
from headway.grpc.inference_call import InferenceCall
from headway.grpc.status import Metadata, StatusCode
from headway.model import Octets, Principal, RequestOptions, Tensors, Value, ValueKind, added_up
from headway.oip import metadata
from headway.oip.grpc.infer_messages import infer_reader
from headway.oip.grpc.infer_stream import InferStreamCall
from headway.oip.rest.models import ShownModels

_NOT_THERE = (NOT_FOUND, NO_WORKERS)  # The model or version isn't served now. Clients that wait for it poll ModelReady.

Answer = Callable[[Any, Principal], Awaitable[Any]]
"""Returns the members of the answer, given the request message and its principal. Raises RequestError."""


class OpenInference:
    """The methods of the Open Inference Protocol except inference. `ready` returns True if this process should get traffic."""

    def __init__(self, port: PortContext, ready: Callable[[], Awaitable[bool]]) -> None:
        self._models = ShownModels(port.gateway, port.entrance.anonymous, ready)

    @property
    def for_everybody(self) -> dict[str, Answer]:
        return {"ServerLive": self._live, "ServerReady": self._server_ready, "ServerMetadata": self._server}

    @property
    def for_principals(self) -> dict[str, Answer]:
        return {
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._never,
            "RepositoryModelUnload": self._never,
        }

    async def _live(self, message: Any, principal: Principal) -> Any:
        return {"live": True}

    async def _server_ready(self, message: Any, principal: Principal) -> Any:
        return {"ready": await self._models.ready()}

    async def _server(self, message: Any, principal: Principal) -> Any:
        return metadata.ServerMetadata()

    async def _model_ready(self, message: Any, principal: Principal) -> Any:
        try:
            model = self._find(message, principal)
        except RequestError as exc:
            if exc.code in _NOT_THERE:
                return {"ready": False}
            raise
        return {"ready": await self._models.is_ready(model)}

    async def _model(self, message: Any, principal: Principal) -> Any:
        return self._models.metadata(self._find(message, principal))

    async def _config(self, message: Any, principal: Principal) -> Any:
        return {"config": self._models.config(self._find(message, principal))}

    async def _statistics(self, message: Any, principal: Principal) -> Any:
        model = self._find(message, principal) if message.name else ""
        return {"model_stats": self._models.statistics(principal, model)}

    async def _index(self, message: Any, principal: Principal) -> Any:
        return {"models": await self._models.index(principal, only_ready=message.ready)}

    async def _never(self, message: Any, principal: Principal) -> Any:
        message = "clients cannot load or unload models; start a worker for a model instead"
        raise RequestError(message, code=NOT_IMPLEMENTED)

    def _find(self, message: Any, principal: Principal) -> str:
        return self._models.find(message.name, message.version or None, principal)


def responder(
    method: str, answer: Answer, limiter: Limiter | None = None
) -> Callable[[bytes, Principal], Awaitable[bytes]]:
    """Return a function that answers a request message. If there is a `limiter`, calls count as polls."""
    request, response = protos.message_classes(protos.OPEN_INFERENCE, method)

    async def respond(body: bytes, principal: Principal) -> bytes:
        if limiter is not None and (over := limiter.poll(principal.limits)) is not None:
            raise error_of(over)
        members = await answer(protos.read(request, body), principal)
        return bytes(response(**msgspec.to_builtins(members)).SerializeToString())

    return respond


_REQUEST = protos.message("headway.v1.PredictRequest")
_RESPONSE = protos.message("headway.v1.PredictResponse")
_OUTPUT = bytes((_RESPONSE.DESCRIPTOR.fields_by_name["output"].number << 3 | 2,))  # Precedes the output's length.
_TENSORS = ValueKind.TENSORS


def _read(body: bytes, options: RequestOptions, known: KnownModels) -> Exchange:
    request = protos.read(_REQUEST, body)
    model = request.model_id or known.default
    takes = known[model].takes
    input: Value | list[Value]
    if takes is _TENSORS:
        input = finish(_tensors(known, model, request.input_data))
    else:
        input = Octets(request.input_data) if takes is ValueKind.BYTES else read_text(request.input_data)
    return Exchange(model, input, b"", options, partial(_write, known, model))


def _read_in_steps(body: bytes, options: RequestOptions, known: KnownModels) -> Steps[Exchange]:
    request = protos.read(_REQUEST, body)
    model = request.model_id or known.default
    takes = known[model].takes
    input: Value | list[Value]
    if takes is _TENSORS:
        input = yield from _tensors(known, model, request.input_data)
    else:
        input = Octets(request.input_data) if takes is ValueKind.BYTES else read_text(request.input_data)
    return Exchange(model, input, b"", options, partial(_write, known, model))


PREDICT_READER = Reader(_read, _read_in_steps)


def _tensors(known: KnownModels, model: str, text: bytes) -> Steps[Value | list[Value]]:
    try:
        value = values.read(text) if len(text) <= SHORT else (yield from values.read_in_steps(text))
    except values.NoValue as exc:
        raise BadRequest(f"the input {exc}") from None
    except (ValueError, RecursionError) as exc:
        raise BadRequest(
            f"the input is not JSON text: {exc}; the model takes tensors, as nested arrays in JSON; the Open Inference Protocol's "
            "ModelInfer accepts them in binary"
        ) from None
    return (yield from to_tensors_in_steps(known, model, value))


def _write(known: KnownModels, model: str, outcome: Outcome) -> Written:
    [output] = outcome.outputs
    answer = _RESPONSE(request_id=outcome.id, latency_ms=outcome.milliseconds)
    if (used := added_up(outcome.tokens)) is not None:
        answer.tokens_used = used.used
    if isinstance(output, str):
        answer.output = b64decode(output) if known[model].gives is ValueKind.BYTES else output.encode()
    elif isinstance(output, Tensors):
        pieces = _with_tensors(answer.SerializeToString(), output)
        return b"", pieces if is_large(output) else b"".join(pieces)
    else:
        answer.output = output.content if isinstance(output, Octets) else output
    return b"", answer.SerializeToString()


def _with_tensors(answer: bytes, output: Tensors) -> Iterator[bytes]:
    text: list[bytes] = []
    try:
        for piece in tensor_json.pieces(output):
            text.append(piece)
            yield b""
    except NoTensors as exc:
        raise no_json(exc, ", by ModelInfer of the Open Inference Protocol") from None
    yield answer + _OUTPUT + protos.varint(sum(map(len, text)))
    yield from text


_CHECK = protos.message("grpc.health.v1.HealthCheckRequest")
_STATUS = protos.message("grpc.health.v1.HealthCheckResponse")
_LIST = protos.message("grpc.health.v1.HealthListResponse")

UP = _STATUS.SERVING
DOWN = _STATUS.NOT_SERVING
UNKNOWN = _STATUS.SERVICE_UNKNOWN

NAMES = frozenset(("", *protos.SERVICES))

_PREDICTS, _INFERS = f"{protos.HEADWAY}/Predict", f"{protos.OPEN_INFERENCE}/ModelInfer"
_STREAMS = f"{protos.OPEN_INFERENCE}/ModelStreamInfer"


def methods_of(port: PortContext, health: Health) -> dict[str, MakeCall]:
    """Return the functions that make calls, by method path."""
    infer = infer_reader(port.settings)
    methods: dict[str, MakeCall] = {
        f"/{_PREDICTS}": lambda stream: InferenceCall(port, stream, PREDICT_READER, f"grpc {_PREDICTS}"),
        f"/{protos.HEALTH}/Check": lambda stream: PlainCall(port, stream, health.check),
        f"/{protos.HEALTH}/List": lambda stream: PlainCall(port, stream, health.list),
        f"/{protos.HEALTH}/Watch": lambda stream: WatchCall(port, stream, health),
    }
    for reflection in (protos.REFLECTION, protos.REFLECTION_ALPHA):
        package = reflection.rpartition(".")[0]
        methods[f"/{reflection}/ServerReflectionInfo"] = partial(ReflectionCall, port, package=package)
    service = f"/{protos.OPEN_INFERENCE}"
    methods[f"/{_INFERS}"] = lambda stream: InferenceCall(port, stream, infer, f"grpc {_INFERS}")
    methods[f"/{_STREAMS}"] = lambda stream: InferStreamCall(port, stream, infer, f"grpc {_STREAMS}")
    others = OpenInference(port, health.ready)
    for known, answers in ((False, others.for_everybody), (True, others.for_principals)):
        for name, answer in answers.items():
            respond = responder(name, answer, port.gateway.limiter if known else None)
            methods[f"{service}/{name}"] = partial(PlainCall, port, respond=respond, known=known)
    return methods


class Health:
    """The health service, `grpc.health.v1.Health`. The process (the empty name) and all services have the same status: SERVING if the
    process should get traffic, like `/readyz`. `leaving` is set when the process shuts down."""

    def __init__(self, glance: CachedReadiness) -> None:
        self._glance = glance
        self.leaving = asyncio.Event()

    async def ready(self) -> bool:
        return bool(await self.status() == UP)

    async def status(self) -> int:
        if self.leaving.is_set():
            return int(DOWN)
        serving = await self._glance.serving()
        return int(UP if serving and not self.leaving.is_set() else DOWN)

    async def check(self, body: bytes, principal: Principal) -> bytes:
        name = protos.read(_CHECK, body).service
        if name not in NAMES:
            raise NotFound("no service of this name is served here")
        return bytes(_STATUS(status=await self.status()).SerializeToString())

    async def list(self, body: bytes, principal: Principal) -> bytes:
        answer, status = _LIST(), await self.status()
        for name in sorted(NAMES):
            answer.statuses[name].status = status
        return bytes(answer.SerializeToString(deterministic=True))


class WatchCall(StreamCall):
    """A Watch call. It sends the status immediately, and again after each change."""

    __slots__ = ("_health",)

    def __init__(self, port: PortContext, stream: CallStream, health: Health) -> None:
        super().__init__(port, stream)
        self._health = health

    async def talk(self) -> Metadata:
        self.shown = ID_PREFIX + self.port.entrance.new_id()
        self.belong_to_address()
        name = protos.read(_CHECK, await self.read()).service
        self.drop(self.kept)
        sent = -1
        while True:
            status = await self._health.status() if name in NAMES else int(UNKNOWN)
            if status != sent:
                sent = status
                await self.send(_STATUS(status=status).SerializeToString())
            if self.retired:
                raise to_be_opened_anew()
            await self.pause(AGE)


class ReflectionCall(StreamCall):
    """A call of the reflection service, from which tools such as grpcurl learn about the services."""

    __slots__ = ("_request", "_response")

    def __init__(self, port: PortContext, stream: CallStream, package: str) -> None:
        super().__init__(port, stream)
        self._request = protos.message(f"{package}.ServerReflectionRequest")
        self._response = protos.message(f"{package}.ServerReflectionResponse")

    async def talk(self) -> Metadata:
        self.shown = ID_PREFIX + self.port.entrance.new_id()
        self.belong_to_address()
        self.hold_room()
        while (body := await self.next()) is not None:
            await self.send(self._answer(protos.read(self._request, body)).SerializeToString())
        return ()

    def _answer(self, asked: Any) -> Any:
        answer = self._response(valid_host=asked.host, original_request=asked)
        match asked.WhichOneof("message_request"):
            case "list_services":
                for name in protos.SERVICES:
                    answer.list_services_response.service.add(name=name)
            case "file_by_filename":
                self._give_file(answer, asked.file_by_filename)
            case "file_containing_symbol":
                symbol = asked.file_containing_symbol
                self._give_file(answer, protos.file_of(symbol) or symbol)
            case "all_extension_numbers_of_type":
                self._give_extensions(answer, asked.all_extension_numbers_of_type)
            case "file_containing_extension":
                of = asked.file_containing_extension
                message = f"there is no extension number {of.extension_number} of {excerpt(of.containing_type)}"
                _fail(answer, StatusCode.NOT_FOUND, message)
            case _:
                _fail(answer, StatusCode.UNIMPLEMENTED, "unknown request")
        return answer

    def _give_extensions(self, answer: Any, name: str) -> None:
        if protos.is_message(name):
            answer.all_extension_numbers_response.base_type_name = name
        else:
            _fail(answer, StatusCode.NOT_FOUND, f"there is no such type: {excerpt(name)}")

    def _give_file(self, answer: Any, name: str) -> None:
        file = protos.FILES.get(name)
        if file is None:
            _fail(answer, StatusCode.NOT_FOUND, f"there is no such file or symbol: {excerpt(name)}")
        else:
            answer.file_descriptor_response.file_descriptor_proto.append(file)


def _fail(answer: Any, code: int, message: str) -> None:
    answer.error_response.error_code = code
    answer.error_response.error_message = message
