"""The processes of a drill: each keeps its name and its port, and can be killed, stopped, ended and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from bench.stand import fleet, stand
from bench.stand.stand import Broken, Server
from tests.servers.ports import Port

ROLES = ("gateway", "worker", "controller")


class Post:
    """One process of the fleet, whoever fills it at the moment.

    Arguments:
        role: one of ROLES.
        number: among all posts.
        flags: of its command line.
        environment: variables it gets.
        target: what a worker runs.

    Attributes:
        port, grpc_port: of a gateway.
    """

    def __init__(self, role: str, number: int, flags: Sequence[str], environment: dict[str, str], target: str) -> None:
        self.role = role
        self.port = self.grpc_port = 0
        self._name = f"drills-{role}-{number}"
        own = [target] if role == "worker" else []
        self._held: tuple[Port, ...] = ()
        if role == "gateway":
            # Held, so that nobody else is given them between an end and a start.
            self._held = Port(), Port()
            self.port, self.grpc_port = self._held[0].number, self._held[1].number
            own = ["--host", "127.0.0.1", "--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        self._command = [sys.executable, "-m", "headway", role, *own, "--admin-port", "0", *flags]
        self._environment = environment
        self._starts = 0
        self.server = self._launched()

    def up(self) -> None:
        """Return when it serves."""
        fleet.wait_until_up(self.role, self.server)

    async def start(self) -> None:
        """Fill the post again; returns when it serves, and a gateway is ready."""
        self.server = self._launched()
        await asyncio.to_thread(self.up)
        if self.role == "gateway":
            await asyncio.to_thread(self.server.wait_for, self.ready)

    def ready(self) -> bool:
        """Whether a gateway's public port says that it is ready."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    async def end(self) -> None:
        """Tell it to end, and wait for that.

        Raises:
            Broken: its exit code is not 0.
        """
        code = await asyncio.to_thread(self.server.stop)
        if code:
            raise Broken(f"{self._name} ended with exit code {code}:\n{self.server.output[-2000:]}")

    def close(self) -> None:
        """End it for good."""
        self.server.stop()
        for port in self._held:
            port.close()

    def kill(self) -> None:
        """End it at once."""
        self.server.kill()

    def gpus(self) -> list[int]:
        """Process ids of its GPU processes."""
        return fleet.gpu_pids(self.server)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Have it do nothing while the context lasts."""
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    def _launched(self) -> Server:
        self._starts += 1
        return Server(f"{self._name}-{self._starts}", self._command, lambda _: self.role, self._environment)


class Crew:
    """All posts; use it as a context manager.

    Arguments:
        url: of the broker.
        counts: how many of each role.
        flags: of every role, and by role.
        batch_ms, max_batch: of the GPUs, which are made of sleep.
        target: what the workers run.
    """

    def __init__(
        self,
        url: str,
        counts: dict[str, int],
        flags: Mapping[str, Sequence[str]],
        batch_ms: float,
        max_batch: int,
        target: str = stand.EMULATED_GPU,
    ) -> None:
        common = ("--broker", url, "--log-level", "info", "--max-batch-size", str(max_batch))
        environment = {"EMULATED_MS": str(batch_ms), "EMULATED_MAX": str(max_batch)}
        self.posts: list[Post] = []
        try:
            for role in reversed(ROLES):
                for _ in range(counts[role]):
                    more = (*common, *flags.get("", ()), *flags.get(role, ()))
                    self.posts.append(Post(role, len(self.posts), more, environment, target))
            for post in self.posts:
                post.up()
        except BaseException:
            self.close()
            raise

    def of(self, role: str) -> list[Post]:
        """The posts of a role."""
        return [post for post in self.posts if post.role == role]

    def close(self) -> None:
        """End all, those who take requests first."""
        for post in reversed(self.posts):
            with contextlib.suppress(ProcessLookupError):
                if post.server.is_running:
                    os.kill(post.server.pid, signal.SIGCONT)
            post.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
