"""Real gRPC servers on loopback that act as misbehaving remote APIs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc

from headway import protos
from headway.core.tensors import join_elements, split_elements
from headway.grpc.reader import PREFACE
from tests.authority import Authority
from tests.backends.remote import output_of, served_raw
from tests.fuzz.frames import frame

ASKED, ANSWER = protos.message_classes(protos.OPEN_INFERENCE, "ModelInfer")
_METADATA = protos.message_classes(protos.OPEN_INFERENCE, "ModelMetadata")[1]
INFER = "/inference.GRPCInferenceService/ModelInfer"

Handler = Callable[[Any, Any], Awaitable[bytes]]
"""Request message and context to the bytes of the answer."""


def texts_of(asked: Any) -> list[str]:
    return [text.decode() for text in split_elements(asked.raw_input_contents[0])]


def answer(outputs: Sequence[Any], raw: Sequence[bytes] | None = None, contents: Any = None, **other: Any) -> bytes:
    """Serialize an answer with one tensor of `outputs`, `raw` or typed `contents`. `other` changes the tensor's members."""
    elements = [output.encode() if isinstance(output, str) else b"\xff" for output in outputs]
    said = ANSWER(model_name="m")
    members = {"name": "OUTPUT", "datatype": "BYTES", "shape": [len(outputs)], **other}
    said.outputs.add(**members, **({"contents": contents} if contents is not None else {}))
    if contents is None:
        said.raw_output_contents.extend([join_elements(elements)] if raw is None else raw)
    return bytes(said.SerializeToString())


Specs = Sequence[tuple[str, str, Sequence[int]]]
"""Names, datatypes and shapes of tensors."""


def metadata(inputs: Specs, outputs: Specs) -> bytes:
    said = _METADATA(name="m")
    for place, specs in ((said.inputs, inputs), (said.outputs, outputs)):
        for name, datatype, shape in specs:
            place.add(name=name, datatype=datatype, shape=shape)
    return bytes(said.SerializeToString())


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types.
    def __init__(self, handle: Handler, described: bytes | None) -> None:
        self._handle, self._described = handle, described

    def service(self, details: Any) -> Any:
        if details.method == INFER:
            return grpc.unary_unary_rpc_method_handler(self._infer)
        described = self._described is not None and details.method.endswith("/ModelMetadata")
        return grpc.unary_unary_rpc_method_handler(self._metadata) if described else None

    async def _infer(self, body: bytes, context: Any) -> bytes:
        return await self._handle(ASKED.FromString(body), context)

    async def _metadata(self, body: bytes, context: Any) -> bytes | None:
        return self._described


@asynccontextmanager
async def served_grpc(
    handle: Handler, described: bytes | None = None, port: int = 0, tls: Any = None
) -> AsyncIterator[str]:
    """Serve a model and yield its URL. `described` is its serialized metadata, `tls` the server's credentials."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Methods(handle, described),))
    address = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    try:
        yield f"{'grpc' if tls is None else 'grpcs'}://127.0.0.1:{bound}/m"
    finally:
        await server.stop(0)


def server_credentials(authority: Authority) -> Any:
    """Return credentials for a server that requires client certificates from the authority."""
    certificate, key = authority.issue("api")
    pair = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authority.file.read_bytes(), require_client_auth=True)


async def faulty(asked: Any, context: Any) -> bytes:
    """Fail in the same ways as `tests.targets.faults`, as far as a remote API can."""
    inputs = texts_of(asked)
    for text in inputs:
        if text == "raise":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what is\nthis")
        if text == "exit":
            await context.abort(grpc.StatusCode.UNKNOWN, "gone")
        if text == "hang":
            await asyncio.Event().wait()
        if text in ("short", "long"):
            return answer(["one"] * (len(inputs) + (1 if text == "long" else -1)))
        if text in ("dict", "text"):
            return b"\xff" * 9
    return answer([output_of(text) for text in inputs])


DATA, RST_STREAM, SETTINGS, GOAWAY = 0, 3, 4, 7

Said = Callable[[int], bytes | None]
"""Stream of a request to the frames that are its answer; None: the connection is reset."""


def served_frames(say: Said) -> AbstractAsyncContextManager[str]:
    """Serve raw frames as the answer to each complete request. Yields the URL."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(len(PREFACE))
            writer.write(frame(SETTINGS))
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind == SETTINGS and not flags & 1:
                    writer.write(frame(SETTINGS, 1))
                if kind == DATA and flags & 1:
                    if (said := say(stream)) is None:
                        return
                    writer.write(said)

    return served_raw(talk, "/m", "grpc")
