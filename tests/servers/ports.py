"""Ports chosen by the system that stay reserved while nobody listens on them."""

import socket

LOOPBACK = "127.0.0.1"


class Port:
    """A TCP port on loopback for one server, reserved before its first start and between a stop and a restart. It stays
    bound here, without listening. A server that sets SO_REUSEADDR, like Redis, can still listen on it; nobody else gets
    it, and a client that finds no server doesn't connect to itself."""

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((LOOPBACK, 0))
        self.number: int = self._held.getsockname()[1]

    def close(self) -> None:
        self._held.close()
