"""A call of a target with `together` has one temperature, whichever way requests come and whatever becomes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.client import request, wait_until
from tests.e2e.server import Server, serving
from tests.e2e.test_bulk import job, submit
from tests.targets.together import calls_in

TARGET = "tests.targets.together:Together"
FLAGS = ("--cache", "--collapse", "--max-batch-size", "8")
SENDERS, EACH = 6, 6
GIVEN: Sequence[dict[str, Any]] = (
    {"temperature": 0}, {"temperature": 0.0, "seed": 5}, {"temperature": 0.7}, {"temperature": 1}, {"seed": 5}, {},
)  # fmt: skip


def ask(server: Server, sender: int) -> int:
    """Ask one after the other: new texts, the same as others do at the same time, tasks, and some that fail."""
    connection, failed = server.connect(), 0
    for number in range(EACH):
        parameters = GIVEN[(number + sender) % len(GIVEN)]
        temperature = parameters.get("temperature")
        kind = "poison" if number % 6 == 5 else "same" if number % 4 == 0 else f"new {sender}"
        text = f"{kind} {number} of {temperature if temperature is None else float(temperature)}"
        body = json.dumps({"input": text, "parameters": parameters}).encode()
        connection.send(request(body, "/v1/inference"))
        answer = connection.answer()
        if kind == "poison":
            assert (answer.status, answer.json["error"]) == (422, "REJECTED_BY_MODEL")
            failed += 1
            continue
        assert answer.status == 200, answer.body
        output, _, at = answer.json["output"].rpartition(" at ")
        assert (output, at) == (text, "0" if temperature == 0 else str(temperature))
    return failed


def check(folder: Path) -> None:
    calls = calls_in(folder)
    assert max(len(inputs) for _, inputs in calls) > 1
    for parameters, inputs in calls:
        assert parameters.keys() <= {"temperature"}
        temperature = parameters.get("temperature")
        assert repr(temperature) in {"0", "0.7", "1", "None"}  # As every call gets it, whoever wrote 0.0.
        own = {text.rpartition(" of ")[2] for text in inputs if " of " in text}
        assert own <= {str(temperature if temperature is None else float(temperature))}


def test_in_one_process(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS, "--bulk-dir", "bulk", lawful=False, target=TARGET) as server:
        server.expected = {"batch failed"}
        jobs = [
            submit(server, [f"line {number} of None" for number in range(20)]),
            submit(server, [f"line {number} of 0.7" for number in range(20)], temperature=0.7),
        ]
        with ThreadPoolExecutor(SENDERS) as pool:
            assert all(pool.map(partial(ask, server), range(SENDERS))), "some inputs failed"
        wait_until(lambda: {job(server, id)["status"] for id in jobs} == {"completed"})
        for id in jobs:
            assert job(server, id)["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    check(tmp_path)
