"""The examples in the contract work unchanged, whatever types the models take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import launched


@pytest.mark.parametrize(
    ("targets", "fewest"),
    [
        (["tests.clients.targets:answer"], 7),
        (["tests.targets.arrays:Ranked"], 5),
        (["first=tests.clients.targets:octets", "second=tests.clients.targets:answer"], 4),
    ],
    ids=["texts", "several arrays", "several models"],
)
def test_each_example_of_the_contract_works(targets: list[str], fewest: int, tmp_path: Path) -> None:
    with launched(tmp_path, *targets[1:], target=targets[0]) as server:
        server.ready()
        paths: dict[str, Any] = server.get("/openapi.json").json["paths"]
        answers = {}
        for path, item in paths.items():
            content = item.get("post", {}).get("requestBody", {}).get("content", {})
            if (example := content.get("application/json", {}).get("example")) is not None:
                model = "default" if len(targets) == 1 else "first"
                asked = path.format(model=model, version="1")
                answers[path] = server.post(asked, example).status
        assert set(answers.values()) == {200}, answers
        assert len(answers) >= fewest
        server.signal()
        server.check_end()
