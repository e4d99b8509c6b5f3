"""Methods of the port: which call answers each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headway.grpc import messages
from headway.grpc.calls import Call, PlainCall, PortContext, Respond
from headway.grpc.health import Health, WatchCall
from headway.grpc.infer_stream import InferStreamCall
from headway.grpc.inference_call import InferenceCall
from headway.grpc.open_inference import OpenInference, infer_reader, responder
from headway.grpc.predict import predict_reader
from headway.grpc.reflection import ReflectionCall

MakeCall = Callable[[Any], Call]
"""Metadata of a call to the call."""

_PREDICTS, _INFERS = f"{messages.HEADWAY}/Predict", f"{messages.OPEN_INFERENCE}/ModelInfer"
_STREAMS = f"{messages.OPEN_INFERENCE}/ModelStreamInfer"

FREQUENT = (f"/{_PREDICTS}", f"/{_INFERS}", f"/{_STREAMS}", f"/{messages.HEALTH}/Check")
"""Methods of which many calls come at once."""


class Methods:
    """Methods of all services, as gRPC's server asks for them.

    Arguments:
        port: context of the port.
        health: statuses of the process.
    """

    def __init__(self, port: PortContext, health: Health) -> None:
        self._methods: Mapping[str, MakeCall] = _methods(port, health)

    def service(self, details: Any) -> Call | None:
        """Call to a method; None where there is none of this name."""
        make = self._methods.get(details.method)
        return None if make is None else make(details.invocation_metadata)

    def repeated(self, name: str) -> RepeatedMethod:
        """Handler of all calls of a method."""
        return RepeatedMethod(self._methods[name])


class RepeatedMethod:
    """Handler of all calls of a method, each of which is made when it is run.

    Arguments:
        make: makes a call of its metadata.
    """

    request_streaming = True
    request_deserializer = response_serializer = None
    unary_unary = unary_stream = None

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self.response_streaming = make(()).response_streaming

    async def stream_unary(self, asked: object, context: Any) -> bytes:
        """Answer a call; see grpc.RpcMethodHandler."""
        answering = self._make(context.invocation_metadata()).stream_unary(asked, context)
        del asked, context  # See `Call.stream_unary`.
        answer: bytes = await answering
        return answer

    async def stream_stream(self, asked: object, context: Any) -> None:
        """Answer a call with messages both ways; see grpc.RpcMethodHandler."""
        answering = self._make(context.invocation_metadata()).stream_stream(asked, context)
        del asked, context
        await answering


def _methods(port: PortContext, health: Health) -> dict[str, MakeCall]:
    predict = predict_reader(port.settings)
    infer = infer_reader(port.settings)
    found: dict[str, MakeCall] = {
        f"/{_PREDICTS}": lambda metadata: InferenceCall(port, metadata, predict, f"grpc {_PREDICTS}"),
        f"/{messages.HEALTH}/Check": lambda metadata: PlainCall(port, metadata, health.check),
        f"/{messages.HEALTH}/List": lambda metadata: PlainCall(port, metadata, health.list),
        f"/{messages.HEALTH}/Watch": lambda metadata: WatchCall(port, metadata, health),
        f"/{messages.REFLECTION}/ServerReflectionInfo": lambda metadata: ReflectionCall(
            port, metadata, "grpc.reflection.v1"
        ),
        f"/{messages.REFLECTION_ALPHA}/ServerReflectionInfo": lambda metadata: ReflectionCall(
            port, metadata, "grpc.reflection.v1alpha"
        ),
    }
    service = f"/{messages.OPEN_INFERENCE}"
    found[f"/{_INFERS}"] = lambda metadata: InferenceCall(port, metadata, infer, f"grpc {_INFERS}")
    found[f"/{_STREAMS}"] = lambda metadata: InferStreamCall(port, metadata, infer, f"grpc {_STREAMS}")
    others = OpenInference(port, health.ready)
    for known, answers in ((False, others.for_everybody), (True, others.for_principals)):
        for name, answer in answers.items():
            found[f"{service}/{name}"] = partial(
                _plain, port, respond=responder(name, answer, port.intake.limiter if known else None), known=known
            )
    return found


def _plain(port: PortContext, metadata: Any, respond: Respond, known: bool) -> PlainCall:
    return PlainCall(port, metadata, respond, known=known)
