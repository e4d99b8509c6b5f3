"""Both Python clients with a running service. One of their connections is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.client import Unauthenticated
from tests.client.asking import CLIENTS, asking
from tests.e2e.client import PATIENCE, Gate, wait_until
from tests.e2e.server import serving
from tests.identity.writing import entry, key_of
from tests.servers.proxy import ChaosProxy
from tests.targets.counted import runs_in


def test_who_loses_an_answer_gets_the_same_with_the_next_attempt_and_nothing_runs_again(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("good", more="rate = 0"))
    target = "tests.targets.counted:Counted"
    with (
        serving(tmp_path, "--keys", "keys.toml", target=target, lawful=False) as server,
        ChaosProxy(server.port) as proxy,
        ThreadPoolExecutor(1) as thread,
    ):
        url = f"http://127.0.0.1:{proxy.port}"
        for kind in CLIENTS:
            gate = Gate(tmp_path)
            with asking(kind, url) as client, pytest.raises(Unauthenticated):
                client.infer("x")
            with asking(kind, url, key_of("good"), timeout=PATIENCE) as client:
                asked = thread.submit(client.infer, gate.text())
                gate.reached()
                proxy.black_hole()
                gate.open()
                wait_until(lambda: server.health()["pending"] == 0)
                proxy.cut()
                proxy.normal()
                assert asked.result(PATIENCE).output == gate.text().upper()
            assert runs_in(tmp_path).count(gate.text()) == 1
