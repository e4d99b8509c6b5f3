"""Budget of a usual call of both inference methods, held to the numbers in budget.toml."""

from __future__ import annotations

import math
import sys

import pytest
from msgspec.structs import replace

from bench.load import http2
from headway.grpc import message_turns, messages
from headway.model import WorkerInfo, WorkerStatus
from tests.grpc.stand import INFER, PREDICT, Port, predict, served
from tests.grpc.wire import SETTINGS, WINDOW, Wire, connect
from tests.http.stand import INSTANT, settled
from tests.http.test_budget import BATCH, BUDGET, FOUR, TEXT, Counts, enough, within


def infer() -> bytes:
    """Message of a ModelInfer with one text."""
    asked = messages.message("inference.ModelInferRequest")(model_name="default")
    asked.inputs.add(name="x", datatype="BYTES", shape=[1]).contents.bytes_contents.append(TEXT.encode())
    return bytes(asked.SerializeToString())


def infer_tensor() -> bytes:
    """Message of a ModelInfer with one row of four numbers."""
    asked = messages.message("inference.ModelInferRequest")(model_name="default", raw_input_contents=[bytes(16)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return bytes(asked.SerializeToString())


CALLS = {
    "grpc predict": (PREDICT, predict(TEXT)),
    "grpc infer": (INFER, infer()),
    "grpc tensor": (INFER, infer_tensor()),
}
"""Path and message of a call."""


async def batch(port: Port, wire: Wire, numbers: range, kind: str) -> None:
    """One call that keeps the worker busy, and a full batch that gathers meanwhile."""
    path, message = CALLS[kind]
    first, *others = [http2.headers(number, path) + http2.message(number, message) for number in numbers]
    runs = len(port.stand.runs)
    port.stand.go.clear()
    wire.send(first)
    await settled(lambda: len(port.stand.runs) > runs)
    wire.send(*others)
    await settled(lambda: port.stand.real.pending == len(numbers))
    port.stand.go.set()
    assert [(await wire.ended(number)).status for number in numbers] == ["0"] * len(numbers)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each version of Python has bytecodes of its own")
@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.parametrize("kind", CALLS)
def test_a_usual_call_costs_no_more_than_its_budget(kind: str) -> None:
    """All messages are taken in at once and their answers are waited for, as turns and reads are timed, and tracing takes time."""

    async def main(port: Port) -> None:
        if kind == "grpc tensor":
            worker = WorkerInfo(
                worker_id="gpu-0", model="default", status=WorkerStatus.HEALTHY, takes="tensors", gives="tensors"
            )
            worker = replace(worker, inputs=(FOUR,), outputs=(FOUR,))
            await port.stand.broker.heartbeat(worker)
            port.stand.real.served.learn([worker])
        # On a busy machine there are many rounds, whose answers are more than a client takes that gives no room.
        room = http2.frame(WINDOW, 0, 0, (1 << 30).to_bytes(4, "big"))
        wire = await connect(port, http2.PREFACE, http2.frame(SETTINGS, 0, 0), room)
        size = 1 + BATCH
        await batch(port, wire, range(size), kind)
        rounds = list[Counts]()
        while not enough(BUDGET[kind], rounds, size):
            number = 1 + len(rounds)
            with Counts() as counts:
                await batch(port, wire, range(number * size, (number + 1) * size), kind)
            rounds.append(counts)
        wire.writer.close()
        within(BUDGET[kind], rounds, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_turns, "SHARE", math.inf)
        served(main, whole=True, now=lambda: INSTANT, user_rate=0.0)
