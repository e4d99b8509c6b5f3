"""Methods of the port, and the call that answers each of them."""

from __future__ import annotations

from functools import partial

from headway.grpc import messages
from headway.grpc.call_stream import CallStream
from headway.grpc.calls import PlainCall, PortContext, Respond
from headway.grpc.connection import MakeCall
from headway.grpc.health import Health, WatchCall
from headway.grpc.inference_call import InferenceCall
from headway.grpc.predict import PREDICT_READER
from headway.grpc.reflection import ReflectionCall
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
        f"/{messages.REFLECTION}/ServerReflectionInfo": lambda stream: ReflectionCall(
            port, stream, "grpc.reflection.v1"
        ),
        f"/{messages.REFLECTION_ALPHA}/ServerReflectionInfo": lambda stream: ReflectionCall(
            port, stream, "grpc.reflection.v1alpha"
        ),
    }
    service = f"/{messages.OPEN_INFERENCE}"
    methods[f"/{_INFERS}"] = lambda stream: InferenceCall(port, stream, infer, f"grpc {_INFERS}")
    methods[f"/{_STREAMS}"] = lambda stream: InferStreamCall(port, stream, infer, f"grpc {_STREAMS}")
    others = OpenInference(port, health.ready)
    for known, answers in ((False, others.for_everybody), (True, others.for_principals)):
        for name, answer in answers.items():
            methods[f"{service}/{name}"] = partial(
                _plain, port, respond=responder(name, answer, port.gateway.limiter if known else None), known=known
            )
    return methods


def _plain(port: PortContext, stream: CallStream, respond: Respond, known: bool) -> PlainCall:
    return PlainCall(port, stream, respond, known=known)
