"""Remote APIs over gRPC that misbehave, real servers on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from headway import protos
from tests.backends.remote import output_of

_ASKED, _ANSWER = protos.message_classes(protos.OPEN_INFERENCE, "ModelInfer")
_METADATA = protos.message_classes(protos.OPEN_INFERENCE, "ModelMetadata")[1]
INFER = "/inference.GRPCInferenceService/ModelInfer"

Handler = Callable[[Any, Any], Awaitable[bytes]]
"""Request message and context to the bytes of the answer."""


def texts_of(asked: Any) -> list[str]:
    data, texts = asked.raw_input_contents[0], []
    while data:
        length = int.from_bytes(data[:4], "little")
        texts.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return texts


def pack(elements: Sequence[bytes]) -> bytes:
    return b"".join(len(one).to_bytes(4, "little") + one for one in elements)


def answer(outputs: Sequence[Any], raw: Sequence[bytes] | None = None, contents: Any = None, **other: Any) -> bytes:
    """Answer of one tensor with these outputs, or with `raw` or typed `contents` in their place; `other` changes members of the
    tensor."""
    elements = [output.encode() if isinstance(output, str) else b"\xff" for output in outputs]
    said = _ANSWER(model_name="m")
    members = {"name": "OUTPUT", "datatype": "BYTES", "shape": [len(outputs)], **other}
    said.outputs.add(**members, **({"contents": contents} if contents is not None else {}))
    if contents is None:
        said.raw_output_contents.extend([pack(elements)] if raw is None else raw)
    return bytes(said.SerializeToString())


def metadata(
    datatype: str = "BYTES", shape: Sequence[int] = (-1,), output: str = "OUTPUT", row: Sequence[int] = ()
) -> bytes:
    """Metadata of a model with one input of texts, and one output of this datatype, with rows of this shape where they have one."""
    said = _METADATA(name="m")
    said.inputs.add(name="text", datatype="BYTES", shape=shape)
    said.outputs.add(name=output, datatype=datatype, shape=[-1, *row] if row else shape)
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
        return await self._handle(_ASKED.FromString(body), context)

    async def _metadata(self, body: bytes, context: Any) -> bytes | None:
        return self._described


@asynccontextmanager
async def served_grpc(
    handle: Handler, described: bytes | None = None, port: int = 0, tls: Any = None
) -> AsyncIterator[str]:
    """URL of a model whose inference `handle` answers, and whose metadata are `described`. `tls`: the server's credentials."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Methods(handle, described),))
    address = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    try:
        yield f"{'grpc' if tls is None else 'grpcs'}://127.0.0.1:{bound}/m"
    finally:
        await server.stop(0)


async def faulty(asked: Any, context: Any) -> bytes:
    """Goes wrong like `tests.targets.faults`, as far as a remote API can."""
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


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


SETTINGS, RST_STREAM, GOAWAY, HEADERS, DATA = 4, 3, 7, 1, 0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Said = Callable[[int], bytes | None]
"""Stream of a request to the frames that are its answer; None: the connection is reset."""


@asynccontextmanager
async def served_frames(say: Said) -> AsyncIterator[str]:
    """URL of a server that answers each request, once its message is whole, with frames."""
    tasks: set[asyncio.Task[Any]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            await reader.readexactly(len(PREFACE))
            writer.write(frame(SETTINGS, 0, 0, b""))
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                if kind == SETTINGS and not flags & 1:
                    writer.write(frame(SETTINGS, 1, 0, b""))
                if kind == DATA and flags & 1:
                    if (said := say(stream)) is None:
                        writer.transport.abort()
                        return
                    writer.write(said)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}/m"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
