"""Startup: which ports are open while the target loads, and how a service manager is notified."""

from __future__ import annotations

import select
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
    """Reserve two ports that no other test gets."""
    held = Port(), Port()
    yield held[0].number, held[1].number
    for port in held:
        port.close()


def refuses(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


class Manager:
    """A service manager's socket, as with systemd's Type=notify. Abstract if the address starts with `@`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.settimeout(PATIENCE)
        self._sock.bind(address.replace("@", "\0", 1))

    def told(self) -> list[str]:
        """Return the lines of the next notification."""
        return self._sock.recv(4096).decode().splitlines()

    def quiet(self) -> bool:
        """Return True if there is no notification now."""
        return not select.select([self._sock], [], [], 0)[0]

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


def test_while_its_target_loads_it_says_no_more_than_that_it_lives(
    tmp_path: Path, ports: tuple[int, int], manager: Manager
) -> None:
    gate = Gate(tmp_path, SETUP_GATE)
    flags, environ = ("--port", str(ports[0]), "--admin-port", str(ports[1])), {VARIABLE: manager.address}
    with launched(tmp_path, *flags, environ=environ, fresh=True) as server:
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
        assert server.banner() == "" and manager.quiet()
        assert server.logged("loading")["worker"] == "cpu-0"
        gate.dissolve()
        assert "READY=1" in manager.told()
        server.ready()
        loaded = server.logged("loaded")
        assert loaded["seconds"] > 0 and loaded["warm_up_ms"] > 0
        assert server.get("/readyz").status == 200
        assert not server.log("leads the fleet"), "a process alone says nothing of a fleet"
        own, *children = (Path(f"/proc/{pid}/environ").read_bytes() for pid in sorted(server.processes()))
        assert children and VARIABLE.encode() in own
        assert not any(VARIABLE.encode() in child for child in children)
        server.signal()
        assert "STOPPING=1" in manager.told()
        server.check_end()


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
