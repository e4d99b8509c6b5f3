"""Ports chosen by the system that stay ours while nobody listens on them."""

import socket

LOOPBACK = "127.0.0.1"


class Port:
    """A TCP port on loopback for one server, before its first start and between a stop and a restart.

    It stays bound here, without listening. A server that sets SO_REUSEADDR, as Redis does, can listen on it all the same;
    nobody else is given it, and no client that calls in vain connects to itself.
    """

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((LOOPBACK, 0))
        self.number: int = self._held.getsockname()[1]

    def close(self) -> None:
        self._held.close()
