"""A start: what is open while the target loads, what is found before it loads, and what a service manager is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.app.runner import VARIABLE, ServiceManager
from tests.e2e.client import PATIENCE, Gate
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


def test_a_taken_port_is_found_before_the_target_loads(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("open('loaded', 'w').close()\n\ndef answer(inputs):\n    return inputs\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        with launched(tmp_path, "--admin-port", taken, target="slow.py:answer", logs_json=False) as server:
            assert server.ended() == 3
            assert f"headway: --admin-port = {taken}: is taken by another program" in server.log_text()
    assert not (tmp_path / "loaded").exists()


class Manager:
    """Socket of a service manager, as systemd has it with Type=notify.

    Arguments:
        address: its address; with a first `@` an abstract one.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.settimeout(PATIENCE)
        self._sock.bind(address.replace("@", "\0", 1))

    def told(self) -> list[str]:
        """Lines of the next notice."""
        return self._sock.recv(4096).decode().splitlines()

    def quiet(self) -> bool:
        """Whether there is no notice now."""
        self._sock.settimeout(0.0)
        try:
            self._sock.recv(4096)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


def test_a_service_manager_is_told_when_it_serves_and_when_it_ends(tmp_path: Path, manager: Manager) -> None:
    with launched(tmp_path, environ={VARIABLE: manager.address}, fresh=True) as server:
        assert "READY=1" in manager.told()
        server.ready()
        assert server.get("/readyz").status == 200
        own, *children = (Path(f"/proc/{pid}/environ").read_bytes() for pid in sorted(server.processes()))
        assert children
        assert VARIABLE.encode() in own
        assert not any(VARIABLE.encode() in child for child in children)
        server.signal()
        assert "STOPPING=1" in manager.told()
        server.check_end()


def test_a_service_that_cannot_start_is_never_ready(tmp_path: Path, manager: Manager) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef answer(inputs):\n    time.sleep(0.5)\n    return inputs\n")
    flags, environ = ("--gpu-timeout-ms", "200"), {VARIABLE: manager.address}
    with launched(tmp_path, *flags, target="slow.py:answer", environ=environ, logs_json=False) as server:
        assert server.ended() == 4
        [said] = [line for line in server.log_text().splitlines() if line.startswith("headway: ")]
        assert "ms for one input, longer than --gpu-timeout-ms 200: no request would get its answer" in said
    assert manager.quiet()


def test_an_abstract_socket_is_told_and_one_that_is_gone_or_none_does_no_harm() -> None:
    manager = Manager("@headway-test-service-manager")
    environ = {VARIABLE: manager.address, "OTHER": "1"}
    told = ServiceManager(environ)
    assert environ == {"OTHER": "1"}
    told.tell_ready()
    assert manager.told() == ["READY=1", "STATUS=serving"]
    manager.close()
    told.tell_stopping()
    ServiceManager(environ).tell_ready()
