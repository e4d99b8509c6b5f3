"""A start: what is open while the target loads, what is found before it loads, and what is said of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import launched
from tests.servers.ports import Port
from tests.targets.gates import SETUP_GATE


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two ports that no other test is given."""
    held = Port(), Port()
    yield held[0].number, held[1].number
    for port in held:
        port.close()


def refuses(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_the_admin_port_says_that_it_lives_while_the_target_loads(tmp_path: Path, ports: tuple[int, int]) -> None:
    gate = Gate(tmp_path, SETUP_GATE)
    flags = ("--port", str(ports[0]), "--admin-port", str(ports[1]))
    with launched(tmp_path, *flags, role="serve") as server:
        server.admin_port = ports[1]
        gate.reached()
        assert server.admin("/livez").status == 200
        ready = server.admin("/readyz?verbose")
        assert (ready.status, ready.json["status"]) == (503, "starting")
        assert server.health()["status"] == "starting"
        assert server.admin("/metrics").status == 200
        early = server.admin("/internal/dlq")
        assert (early.status, "starting" in early.message) == (503, True)
        assert refuses(ports[0]), "clients are let in when the target has passed its warm-up"
        assert server.banner() == ""
        assert server.logged("loading")["worker"] == "cpu-0"
        gate.remove()
        gate.open()
        server.ready()
        loaded = server.logged("loaded")
        assert loaded["seconds"] > 0 and loaded["warm_up_ms"] > 0
        assert server.get("/readyz").status == 200
        assert not server.log("leads the fleet"), "a process alone says nothing of a fleet"
        server.signal()
        server.check_end()


@pytest.mark.parametrize("which", ["--port", "--admin-port"])
def test_a_taken_port_is_found_before_the_target_loads(tmp_path: Path, which: str) -> None:
    (tmp_path / "slow.py").write_text("open('loaded', 'w').close()\n\ndef answer(inputs):\n    return inputs\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        with launched(tmp_path, which, taken, target="slow.py:answer", logs_json=False) as server:
            assert server.ended() == 3
            assert f"headway: {which} = {taken}: is taken by another program" in server.log_text()
    assert not (tmp_path / "loaded").exists()


def test_a_model_slower_than_its_deadline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef answer(inputs):\n    time.sleep(0.5)\n    return inputs\n")
    with launched(tmp_path, "--gpu-timeout-ms", "200", target="slow.py:answer", logs_json=False) as server:
        assert server.ended() == 4
        [said] = [line for line in server.log_text().splitlines() if line.startswith("headway: ")]
        assert "ms for one input, longer than --gpu-timeout-ms 200: no request would get its answer" in said
        wait_until(lambda: not server.processes())
