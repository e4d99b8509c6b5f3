"""Checks that a typical request needs no more Python calls and bytecodes than budget.toml allows."""

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest
from msgspec.structs import replace

import headway
from headway.model import TensorSpec, WorkerInfo, WorkerStatus
from tests.http.stand import Client, Keys, Stand, post, served, settled

BATCH, ROUNDS, MOST_ROUNDS = 32, 3, 300
OURS = str(Path(headway.__file__).parent)
BUDGET: dict[str, dict[str, float]] = tomllib.loads(Path(__file__).with_name("budget.toml").read_text("utf-8"))
KEYS: dict[str, Keys | None] = {"plain": None, "limited": {"k": {"rate": 60_000.0, "burst": 10_000.0}}}
TEXT = "hello world"
TENSOR = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
NUMBERS = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2.5, -3, 4]}
BEHIND = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
BINARY = json.dumps({"inputs": [BEHIND], "parameters": {"binary_data_output": True}})
DOORS: dict[str, tuple[str, Any, int]] = {
    "predict": ("/v1/predict", {"model_id": "default", "input_data": TEXT}, 1),
    "completions": ("/v1/completions", {"model": "default", "prompt": TEXT}, 1),
    "chat": ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": TEXT}]}, 1),
    "open inference": ("/v2/models/default/infer", {"inputs": [TENSOR]}, 1),
    "tensor": ("/v2/models/default/infer", {"inputs": [NUMBERS]}, 1),
    "binary tensor": ("/v2/models/default/infer", BINARY.encode() + bytes(16), 1),
    "stream": (
        "/v1/chat/completions",
        {"model": "default", "messages": [{"role": "user", "content": TEXT}], "stream": True},
        1,
    ),
    "list of 4": ("/v1/inference", {"inputs": [TEXT + str(number) for number in range(4)]}, 4),
}
"""The path, body and number of inputs of a request to each of the other doors."""
KEPT = {"task": "Prefer: respond-async", "key": "Idempotency-Key: %08d"}
"""The header field that makes a request's outcome be kept. Each request has its own key."""
FOUR = TensorSpec("x", "FP32", (4,))
"""What the tensor model takes and returns."""


class Counts:
    """Counts calls and bytecodes while it is entered. `counted` selects the files, by default Headway's."""

    def __init__(self, counted: Callable[[str], bool] = lambda path: path.startswith(OURS)) -> None:
        self._counted = counted
        self.calls: Counter[CodeType] = Counter()
        self.bytecodes: Counter[CodeType] = Counter()

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._counted(frame.f_code.co_filename):
            return None
        self.calls[frame.f_code] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        self.bytecodes[frame.f_code] += event == "opcode"
        return self._step


def share_of(budget: Mapping[str, float], counts: Counts, requests: int) -> float:
    """Return the share of the budget that a round used, in calls or in bytecodes, whichever is larger."""
    calls, bytecodes = counts.calls.total() / requests, counts.bytecodes.total() / requests
    return max(calls / budget["calls"], bytecodes / budget["bytecodes"])


def enough(budget: Mapping[str, float], rounds: Sequence[Counts], requests: int, least: int = ROUNDS) -> bool:
    """Return True if no more rounds are needed: timers make most rounds expensive on a busy machine."""
    cheap = any(share_of(budget, counts, requests) <= 1 for counts in rounds)
    return len(rounds) >= least and (cheap or len(rounds) >= MOST_ROUNDS)


def within(budget: Mapping[str, float], rounds: Sequence[Counts], requests: int) -> None:
    """Check the cheapest round against the budget for one request. Timers fired in the other rounds."""
    counts = min(rounds, key=lambda one: share_of(budget, one, requests))
    found = {"calls": counts.calls.total() / requests, "bytecodes": counts.bytecodes.total() / requests}
    most = "\n".join(f"{spent / requests:8.1f}  {code.co_qualname}" for code, spent in counts.bytecodes.most_common(20))
    for what, allowed in budget.items():
        assert found[what] <= allowed, f"{found} a request; most bytecodes are in\n{most}"
        assert found[what] > 0.97 * allowed, f"{found} a request: lower the budget to it, so that it is kept"


async def batch(stand: Stand, asked: Sequence[Client], request: Callable[[], bytes], inputs: int, status: int) -> None:
    """Send a request that keeps the worker busy, and a full batch that queues behind it. Each request has `inputs` inputs."""
    runs = len(stand.runs)
    stand.go.clear()
    await asked[0].send(request())
    await settled(lambda: len(stand.runs) > runs)
    for client in asked[1:]:
        await client.send(request())
    await settled(lambda: stand.real.pending == inputs * len(asked))
    stand.go.set()
    assert [(await client.answer()).status for client in asked] == [status] * len(asked)
    await settled(lambda: stand.real.pending == 0)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each version of Python has bytecodes of its own")
@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.parametrize("kind", [*KEYS, *DOORS, *KEPT])
def test_the_common_request_costs_no_more_than_its_budget(kind: str) -> None:
    keys = KEYS.get(kind)

    async def main(stand: Stand) -> None:
        path, body, inputs = DOORS.get(kind, ("/v1/inference", {"input": TEXT}, 1))
        fields, numbers = ["Authorization: Bearer k"] if keys else [], count()
        if isinstance(body, bytes):
            fields.append(f"Inference-Header-Content-Length: {len(BINARY)}")
        sent = body if isinstance(body, bytes) else json.dumps(body)

        def request() -> bytes:
            field = KEPT.get(kind, "")
            return post(sent, path, *fields, *filter(None, [field % next(numbers) if "%" in field else field]))

        warm = ((1, 0.01), (BATCH, 0.02))
        worker = WorkerInfo(worker_id="gpu-0", model=stand.settings.model, status=WorkerStatus.HEALTHY, warm_up=warm)
        if "tensor" in kind:
            worker = replace(worker, takes="tensors", gives="tensors", inputs=(FOUR,), outputs=(FOUR,))
            stand.real.served.learn([worker])
        await stand.broker.heartbeat(worker)
        asked, status = [await stand.connect() for _ in range(1 + BATCH // inputs)], 202 if kind == "task" else 200
        for _ in range(2):  # The first request on a connection has its head parsed.
            await batch(stand, asked, request, inputs, status)
        assert stand.door._next_look is not None
        stand.door._next_look.cancel()  # It runs on a timer, so it would count more often on slow machines.
        rounds, size = list[Counts](), 1 + BATCH // inputs
        while not enough(BUDGET[kind], rounds, size):
            with Counts() as counts:
                await batch(stand, asked, request, inputs, status)
            rounds.append(counts)
        within(BUDGET[kind], rounds, size)

    served(main, keys, whole=True, user_rate=0.0)
