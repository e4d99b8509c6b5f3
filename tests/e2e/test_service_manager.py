"""What a service manager is told, as systemd has it with Type=notify."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.app.runner import VARIABLE, ServiceManager
from tests.e2e.client import PATIENCE
from tests.e2e.server import launched


class Manager:
    """Socket of a service manager.

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
        finally:
            self._sock.settimeout(PATIENCE)
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
        assert not any(VARIABLE.encode() in one for one in children)
        server.signal()
        assert "STOPPING=1" in manager.told()
        server.check_end()


def test_a_service_that_cannot_start_is_never_ready(tmp_path: Path, manager: Manager) -> None:
    with launched(
        tmp_path, target="tests.targets.lacks:nothing", environ={VARIABLE: manager.address}, logs_json=False
    ) as server:
        assert server.ended() == 4
    assert manager.quiet()


def test_an_abstract_socket_is_told_and_one_that_is_gone_does_no_harm() -> None:
    manager = Manager("@headway-test-service-manager")
    environ = {VARIABLE: manager.address, "OTHER": "1"}
    told = ServiceManager(environ)
    assert environ == {"OTHER": "1"}
    told.tell_ready()
    assert manager.told() == ["READY=1", "STATUS=serving"]
    manager.close()
    told.tell_stopping()


def test_nobody_is_told_where_there_is_no_service_manager() -> None:
    environ = {"OTHER": "1"}
    ServiceManager(environ).tell_ready()
    assert environ == {"OTHER": "1"}
