"""The proxy does to connections what a network does."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.client import PATIENCE
from tests.servers.proxy import ChaosProxy


@pytest.fixture
def proxy() -> Iterator[ChaosProxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=[accepted], daemon=True).start()

        serving = threading.Thread(target=serve)
        serving.start()
        with ChaosProxy(listener.getsockname()[1]) as proxy:
            yield proxy
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()


def echo(accepted: socket.socket) -> None:
    with accepted:
        try:
            while chunk := accepted.recv(1 << 16):
                accepted.sendall(chunk)
        except OSError:
            return


def connect(proxy: ChaosProxy) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE))


def exactly(end: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (chunk := end.recv(size - len(got))):
        got += chunk
    return got


def silent(end: socket.socket) -> bool:
    """Whether nothing comes, and the connection is open."""
    end.settimeout(0.05)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE)
    return False


def test_latency_holds_each_way_and_keeps_the_order(proxy: ChaosProxy) -> None:
    with connect(proxy) as end:
        proxy.delay(0.03)
        before = time.monotonic()
        for letter in b"abc":
            end.sendall(bytes([letter]))
        assert exactly(end, 3) == b"abc"
        assert time.monotonic() - before >= 0.06
        proxy.normal()
        end.sendall(b"d")
        assert exactly(end, 1) == b"d"


def test_in_a_black_hole_connections_are_made_and_nothing_comes_until_it_is_over(proxy: ChaosProxy) -> None:
    with connect(proxy) as old:
        old.sendall(b"a")
        assert exactly(old, 1) == b"a"
        proxy.black_hole()
        with connect(proxy) as new:
            old.sendall(b"b")
            new.sendall(b"c")
            assert silent(old)
            assert silent(new)
            proxy.normal()
            assert exactly(old, 1) == b"b"
            assert exactly(new, 1) == b"c"


def test_a_cut_resets_all_connections_and_new_ones_are_made(proxy: ChaosProxy) -> None:
    with connect(proxy) as one, connect(proxy) as other:
        for end in (one, other):
            end.sendall(b"a")
            assert exactly(end, 1) == b"a"
        assert proxy.cut() == 2
        for end in (one, other):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    with connect(proxy) as again:
        again.sendall(b"b")
        assert exactly(again, 1) == b"b"
    assert proxy.cut() <= 1
