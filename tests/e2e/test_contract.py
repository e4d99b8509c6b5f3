"""Schemathesis compares the service with its own contract: no answer may break the contract or reveal too much."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from tests.e2e.server import ROOT, Server, serving
from tests.explore import PROFILE
from tests.identity.writing import entry, key_of

pytestmark = pytest.mark.draws

CONFIG = """
hooks = "hooks.py"

[checks]
# Promises kept: a request may ask for a deadline of a millisecond.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
# A good request may come under an Idempotency-Key that another one was sent with.
positive_data_acceptance.expected-statuses = ["2xx", 401, 403, 404, 409, 422, "5xx"]

[[operations]]
# OpenAPI has no words for this: the query names a model when the body is no JSON, and may not when it is; and the shape
# of a tensor has as many elements as its data.
include-name-regex = "^POST /(v1/predict|v2/(models/{model}/)?infer)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "4xx", "5xx"]

[[operations]]
# Prompts times choices are bounded, which OpenAPI has no words for.
include-name = "POST /v1/completions"
checks.positive_data_acceptance.expected-statuses = ["2xx", 401, 403, 404, 409, 413, 422, "5xx"]

[[operations]]
# The target gives texts, which are no embeddings; a batch may have ended, or still read its file.
include-name-regex = "^POST /v1/(embeddings|batches/{id}/cancel)|DELETE /v1/files/{id}$"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 403, 404, 409, 422, "5xx"]
"""
HOOKS = """
import schemathesis

@schemathesis.hook
def filter_case(context, case):
    # Several inputs cannot become a task, and options of streams need a stream, which OpenAPI has no words for.
    body = case.body if isinstance(case.body, dict) else {}
    several = "inputs" in body
    if case.operation.label == "POST /v1/inference" and isinstance(case.body, dict) and several == ("input" in body):
        return False  # One of them, and only one, which few readers of OpenAPI understand.
    if body.get("stream_options") is not None and body.get("stream") is not True:
        return False
    return not (several and "respond-async" in str((case.headers or {}).get("Prefer")))
"""
CREDENTIAL = "--header", f"Authorization: Bearer {key_of('contract')}"
OWN, OPENAI = "^/v1/(inference|predict|result|completions)", "^/v1/(chat|embeddings|responses|models|files|batches)"
PARTS = {
    "own": (5, "--include-path-regex", OWN),
    "openai": (14, "--include-path-regex", OPENAI),
    "others": (15, "--exclude-path-regex", f"/versions/|{OWN}|{OPENAI}"),
}
"""Number of routes in each part of the contract, and the flags that select it. Paths with and without a model version
work alike."""
COVERED = "--phases", "examples,coverage,fuzzing"


Draw = Callable[[int, int], tuple[str, ...]]


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    """Return flags for the number of cases generated for each operation: few in a normal run, more in `make explore`,
    which also changes the seed."""
    exploring = settings.get_current_profile_name() == PROFILE
    seed = request.config.getoption("--hypothesis-seed") if exploring else 1
    return lambda few, many: ("--seed", str(seed or 1), "--max-examples", str(many if exploring else few))


def explore(server: Server, folder: Path, *flags: str) -> str:
    """Return schemathesis's report on the service. It must find nothing wrong."""
    config, seen = folder / "schemathesis.toml", folder / "seen.har"
    config.write_text(CONFIG)
    (folder / "hooks.py").write_text(HOOKS)
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("--config-file", str(config), "run", f"http://127.0.0.1:{server.port}/openapi.json"),
        *("--checks", "all", "--mode", "all", "--no-color"),
        *("--report", "har", "--report-har-path", str(seen), *flags),
    ]
    done = subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    answers = seen.read_text().split('"response":')[1:]
    assert len(answers) > 50
    for secret in (key_of("contract"), str(ROOT), "Traceback", sys.prefix):
        leaks = [answer for answer in answers if secret in answer.partition('"cache":')[0]]
        assert not leaks, leaks[:3]
    assert server.metrics().value("requests_total", outcome="internal") == 0
    return done.stdout


@pytest.mark.parametrize("part", PARTS)
def test_the_service_keeps_its_contract(tmp_path: Path, draw: Draw, part: str) -> None:
    (tmp_path / "keys.toml").write_text(entry("contract", more="rate = 0"))
    flags = "--keys", "keys.toml", "--cache", "--collapse", "--bulk-dir", "bulk"
    with serving(tmp_path, *flags, lawful=False) as server:
        routes, *chosen = PARTS[part]
        written = explore(server, tmp_path, *CREDENTIAL, *COVERED, *chosen, *draw(1, 60))
        assert f"Tested: {routes}" in written
        metrics = server.metrics()
        assert metrics.value("requests_total", outcome="ok") > 50
        assert metrics.value("shared_total") > 0, "some were answered with what was kept"


BULK = ("--bulk-dir", "bulk"), ("--include-path-regex", "^/v1/(files|batches)"), 10, 6
TASKS = (), ("--header", "Prefer: respond-async", "--exclude-checks", "positive_data_acceptance"), 5, 4


@pytest.mark.parametrize(("flags", "chosen", "few", "links"), [BULK, TASKS], ids=["batches", "tasks"])
def test_what_was_begun_can_be_followed_from_link_to_link(
    tmp_path: Path, draw: Draw, flags: Sequence[str], chosen: Sequence[str], few: int, links: int
) -> None:
    (tmp_path / "keys.toml").write_text(entry("contract", more="rate = 0"))
    with serving(tmp_path, "--keys", "keys.toml", *flags, lawful=False) as server:
        written = explore(server, tmp_path, *CREDENTIAL, *chosen, "--phases", "stateful", *draw(few, 60))
        covered = re.search(r"API Links: +(\d+) covered", written)
        assert covered is not None and int(covered[1]) >= links, written
