"""A token issuer with real keys and signatures, and a server that publishes the keys."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from headway.identity.jwt.issuers import Issuer
from headway.identity.jwt.keysets import Unreadable

ISSUER = "https://login.example.com/"
NOW = 1_800_000_000.0

Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def private_key(algorithm: str, name: str = "first") -> Private:
    """Return the key for a name. Except for RS256, it is the same in every run."""
    return _private_key(algorithm, name)


@cache
def _private_key(algorithm: str, name: str) -> Private:
    if algorithm == "RS256":
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    if algorithm == "ES256":
        return ec.derive_private_key(int.from_bytes(sha256(name.encode()).digest()[1:]), ec.SECP256R1())
    return ed25519.Ed25519PrivateKey.from_private_bytes(sha256(name.encode()).digest())


def jwk(algorithm: str, name: str = "first", **members: Any) -> dict[str, Any]:
    implementation = jwt.algorithms.get_default_algorithms()[algorithm]
    public = implementation.to_jwk(private_key(algorithm, name).public_key(), as_dict=True)
    public.pop("key_ops", None)
    return {**public, "kid": name, **members}


def jwks(*keys: Mapping[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def claims(**changed: Any) -> dict[str, Any]:
    good = {"iss": ISSUER, "aud": "headway", "sub": "ada", "exp": int(NOW) + 600, "tenant": "acme", "tier": "paid"}
    return {name: value for name, value in {**good, **changed}.items() if value is not None}


def token(
    algorithm: str = "ES256", name: str = "first", header: Mapping[str, Any] | None = None, **changed: Any
) -> bytes:
    headers = {"kid": name} if header is None else dict(header)
    return jwt.encode(claims(**changed), private_key(algorithm, name), algorithm, headers=headers).encode()


def bearer(text: bytes) -> bytes:
    return b"Bearer " + text


def issuer(algorithm: str = "ES256", jwks: str = "https://login.example.com/jwks", **more: Any) -> Issuer:
    return Issuer(issuer=ISSUER, audience="headway", jwks=jwks, algorithm=algorithm, **more)


class Shelf:
    """A source of key sets that returns or raises what it is told to, and records when it was read."""

    every = 300.0

    def __init__(self, content: bytes | str, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.content, self.clock = content, clock
        self.asked: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self) -> bytes | None:
        self.asked.append(self.clock())
        await self.gate.wait()
        if isinstance(self.content, str):
            raise Unreadable(self.content)
        return self.content


class Publisher:
    """A server for key sets that records the requested paths. While `gate` is closed, responses wait."""

    def __init__(self) -> None:
        self.body = jwks()
        self.status = 200
        self.header: dict[str, str] = {}
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""


@contextmanager
def publishing() -> Iterator[Publisher]:
    publisher = Publisher()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            publisher.asked.append(self.path)
            publisher.gate.wait(30)
            self.send_response(publisher.status)
            for name, value in publisher.header.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(publisher.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that disconnect early."""

    with Server(("127.0.0.1", 0), Handler) as server:
        publisher.url = f"http://127.0.0.1:{server.server_address[1]}/jwks"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield publisher
        finally:
            publisher.gate.set()
            server.shutdown()
            thread.join()
