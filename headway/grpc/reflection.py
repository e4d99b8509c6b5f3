"""Reflection service of the port, in both of its versions: tools such as grpcurl learn from it what is served."""

from __future__ import annotations

from typing import Any

from headway.core.excerpt import excerpt
from headway.doors.fields import ID_PREFIX
from headway.grpc import messages
from headway.grpc.call_stream import CallStream
from headway.grpc.calls import PortContext, StreamCall
from headway.grpc.statuses import Metadata, StatusCode


class ReflectionCall(StreamCall):
    """One call of the service. `package` is the package of the service's version."""

    __slots__ = ("_request", "_response")

    def __init__(self, port: PortContext, stream: CallStream, package: str) -> None:
        super().__init__(port, stream)
        self._request = messages.message(f"{package}.ServerReflectionRequest")
        self._response = messages.message(f"{package}.ServerReflectionResponse")

    async def talk(self) -> Metadata:
        """Answer questions until the client has no more."""
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
        """Answer that a type has no extensions: none of the files has any."""
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
