"""Methods of the port, and the call that answers each of them. Tools such as grpcurl learn the methods by reflection."""

from __future__ import annotations

from functools import partial
from typing import Any

from headway.core.excerpt import excerpt
from headway.doors.fields import ID_PREFIX
from headway.grpc import messages
from headway.grpc.call_stream import CallStream
from headway.grpc.calls import PlainCall, PortContext, StreamCall
from headway.grpc.connection import MakeCall
from headway.grpc.health import Health, WatchCall
from headway.grpc.inference_call import InferenceCall
from headway.grpc.predict import PREDICT_READER
from headway.grpc.statuses import Metadata, StatusCode
from headway.oip.grpc.infer_messages import infer_reader
from headway.oip.grpc.infer_stream import InferStreamCall
from headway.oip.grpc.models import OpenInference, responder

_PREDICTS, _INFERS = f"{messages.HEADWAY}/Predict", f"{messages.OPEN_INFERENCE}/ModelInfer"
_STREAMS = f"{messages.OPEN_INFERENCE}/ModelStreamInfer"


def methods_of(port: PortContext, health: Health) -> dict[str, MakeCall]:
    """Return the makers of calls for all methods, by their paths."""
    infer = infer_reader(port.settings)
    methods: dict[str, MakeCall] = {
        f"/{_PREDICTS}": lambda stream: InferenceCall(port, stream, PREDICT_READER, f"grpc {_PREDICTS}"),
        f"/{messages.HEALTH}/Check": lambda stream: PlainCall(port, stream, health.check),
        f"/{messages.HEALTH}/List": lambda stream: PlainCall(port, stream, health.list),
        f"/{messages.HEALTH}/Watch": lambda stream: WatchCall(port, stream, health),
    }
    for reflection in (messages.REFLECTION, messages.REFLECTION_ALPHA):
        package = reflection.rpartition(".")[0]
        methods[f"/{reflection}/ServerReflectionInfo"] = partial(ReflectionCall, port, package=package)
    service = f"/{messages.OPEN_INFERENCE}"
    methods[f"/{_INFERS}"] = lambda stream: InferenceCall(port, stream, infer, f"grpc {_INFERS}")
    methods[f"/{_STREAMS}"] = lambda stream: InferStreamCall(port, stream, infer, f"grpc {_STREAMS}")
    others = OpenInference(port, health.ready)
    for known, answers in ((False, others.for_everybody), (True, others.for_principals)):
        for name, answer in answers.items():
            respond = responder(name, answer, port.gateway.limiter if known else None)
            methods[f"{service}/{name}"] = partial(PlainCall, port, respond=respond, known=known)
    return methods


class ReflectionCall(StreamCall):
    """One call of the reflection service, whose two versions are in different packages."""

    __slots__ = ("_request", "_response")

    def __init__(self, port: PortContext, stream: CallStream, package: str) -> None:
        super().__init__(port, stream)
        self._request = messages.message(f"{package}.ServerReflectionRequest")
        self._response = messages.message(f"{package}.ServerReflectionResponse")

    async def talk(self) -> Metadata:
        self.shown = ID_PREFIX + self.port.entrance.new_id()
        self.belong_to_address()
        self.hold_room()
        while (body := await self.next()) is not None:
            await self.send(self._answer(messages.read(self._request, body)).SerializeToString())
        return ()

    def _answer(self, asked: Any) -> Any:
        answer = self._response(valid_host=asked.host, original_request=asked)
        match asked.WhichOneof("message_request"):
            case "list_services":
                for name in messages.SERVICES:
                    answer.list_services_response.service.add(name=name)
            case "file_by_filename":
                self._give_file(answer, asked.file_by_filename)
            case "file_containing_symbol":
                symbol = asked.file_containing_symbol
                self._give_file(answer, messages.file_of(symbol) or symbol)
            case "all_extension_numbers_of_type":
                self._give_extensions(answer, asked.all_extension_numbers_of_type)
            case "file_containing_extension":
                of = asked.file_containing_extension
                message = f"there is no extension {of.extension_number} of {excerpt(of.containing_type)}"
                _fail(answer, StatusCode.NOT_FOUND, message)
            case _:
                _fail(answer, StatusCode.UNIMPLEMENTED, "the question is not known")
        return answer

    def _give_extensions(self, answer: Any, name: str) -> None:
        """Answer that a type has no extensions, as none of the files has any."""
        if messages.is_message(name):
            answer.all_extension_numbers_response.base_type_name = name
        else:
            _fail(answer, StatusCode.NOT_FOUND, f"there is no such type: {excerpt(name)}")

    def _give_file(self, answer: Any, name: str) -> None:
        file = messages.FILES.get(name)
        if file is None:
            _fail(answer, StatusCode.NOT_FOUND, f"there is no such file or symbol: {excerpt(name)}")
        else:
            answer.file_descriptor_response.file_descriptor_proto.append(file)


def _fail(answer: Any, code: int, message: str) -> None:
    answer.error_response.error_code = code
    answer.error_response.error_message = message
