"""One reader of one page: a folder, a shell's state, and the services that he has started.

Each address and port in the documents is replaced by one of this run: `10.0.0.N` by `127.0.0.1N`, and each port by a free
one. In output, they are replaced by those of the documents again.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.docs.answers import missing
from tests.docs.pages import ROOT, Block, Command
from tests.e2e.client import wait_until
from tests.servers.ports import Port
from tests.servers.reaper import the_reaper

BIN = Path(sys.executable).parent
PUBLIC, ADMIN = 8000, 9000
PATIENCE = 240
UP = re.compile(r"^(Try it:\n.+\n|Ready\.|=+ Running on )", re.MULTILINE)
_LOCAL = re.compile(r"(?<=http://127\.0\.0\.1:)\d{4,5}\b")
_HOST = re.compile(r"\b10\.0\.0\.(\d)\b")
_ROLE = re.compile(r"\bheadway (serve|gateway|worker|controller)\b")
_ASKS = re.compile(r"\bheadway (status|top|dlq|rollout)\b")


class Service:
    """A service that a reader has started. `output` is the path of its output."""

    def __init__(self, script: str, folder: Path, environ: dict[str, str], output: Path) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = _started(script, folder, environ, file)

    @property
    def told(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def up(self) -> bool:
        """True if it has announced that it serves, or has ended."""
        return bool(UP.search(self.told)) or self.process.poll() is not None

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and its child processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        self.process.wait(PATIENCE)
        the_reaper().forget(self.process.pid)


class Reader:
    """Tries the commands of a page one after the other, in their own environment and folder.

    `installed` puts `headway` on the path. Commands without a host run on `home`. `ids` maps the page's ids to real ones.
    """

    def __init__(self, folder: Path, installed: bool = True, home: str = "") -> None:
        self.folder, self.home = folder, home
        path = os.environ.get("PATH", os.defpath)
        bare = os.pathsep.join(part for part in path.split(os.pathsep) if Path(part) != BIN)
        self.environ = {
            "PATH": f"{BIN}{os.pathsep}{bare}" if installed else bare,
            "HOME": str(folder),
            "COLUMNS": "160",
            "CUDA_VISIBLE_DEVICES": "",
        }
        (folder / ".curlrc").write_text('silent\nwrite-out = "\\n"\n')  # Nearly as on a terminal.
        self.ids: dict[str, str] = {}
        self._prelude: list[str] = []
        self._ports: dict[tuple[str, int], Port] = {}
        self._services: dict[frozenset[tuple[str, str]], Service] = {}
        self._edits: list[tuple[str, str]] = []
        self._foreign: set[int] = set()

    def close(self) -> None:
        for service in self._services.values():
            service.end()
        for port in self._ports.values():
            port.close()

    def port(self, number: int, host: str = "") -> int:
        key = (host or self.home, number)
        if key not in self._ports:
            self._ports[key] = Port()
        return self._ports[key].number

    def stands_for(self, documented: str, real: str) -> None:
        """Replace a string of the documents by `real` in every command."""
        self._edits.append((documented, real))
        self._foreign.update(map(int, re.findall(r"(?<=:)\d{4,5}\b", real)))

    def keep(self, block: Block) -> None:
        """Write the file that a block shows, with the ports of this run."""
        if block.file and "/" not in block.file:
            text = _LOCAL.sub(lambda at: str(self._known(int(at[0]), "")), block.text)
            (self.folder / block.file).write_text(text, encoding="utf-8")

    def remember(self, command: Command) -> None:
        """Run a command that changes the shell's state before every later one."""
        self._prelude.append(self._real(command.text, command.host))

    def run(self, command: Command, edits: Sequence[tuple[str, str]] = (), compares: bool = True) -> None:
        """Run a command to its end. It must print what the page shows, and fail only if the page shows a Headway error."""
        script = self._script(command, edits)
        with (self.folder / ".output").open("w+b") as file:
            process = _started(script, self.folder, self.environ, file)
            ended = process.wait(PATIENCE)
            the_reaper().forget(process.pid)
            file.seek(0)
            came = file.read().decode(errors="replace")
        if compares:
            self._compare(command, script, came)
        fails = any(line.startswith("headway: ") for line in command.shown)
        assert (ended != 0) == fails, f"{command}\n{script}\nended with code {ended}:\n{came}"

    def start(self, command: Command, edits: Sequence[tuple[str, str]] = ()) -> None:
        """Start a service and wait until it serves. Ends the one that had its ports. It must print what the page shows."""
        script = self._script(command, edits).removesuffix("&")
        named = dict(re.findall(r"--(admin-host|admin-port|host|port) (\S+?)(?='|\s|$)", script))
        used = frozenset(
            (named.get(f"{kind}host", ""), named[f"{kind}port"]) for kind in ("", "admin-") if f"{kind}port" in named
        )
        for ports in [ports for ports in self._services if ports & used]:
            self._services.pop(ports).end()
        service = Service(script, self.folder, self.environ, self.folder / f".service-{len(self._services)}")
        self._services[used] = service
        wait_until(service.up)
        assert service.process.poll() is None, f"{command}\n{script}\nended:\n{service.told}"
        self._compare(command, script, service.told)

    def _compare(self, command: Command, script: str, came: str) -> None:
        told = self._documented(came)
        line = missing(command.shown, told, self.ids)
        assert line is None, f"{command}\nThe page shows:\n{line}\nWhat came of\n{script}\nis:\n{told}"

    def _script(self, command: Command, edits: Sequence[tuple[str, str]]) -> str:
        text = command.text
        for documented, real in edits:
            assert documented in text, f"{command}: {documented!r} is to be replaced in it"
            text = text.replace(documented, real)
        return "\n".join([*self._prelude, self._real(text, command.host)])

    def _real(self, text: str, host: str) -> str:
        """Return a command with the addresses, ports and ids of this run."""
        for documented, real in self._edits:
            text = text.replace(documented, real)
        for documented, real in self.ids.items():
            text = text.replace(documented, real)
        text = _HOST.sub(r"127.0.0.1\1", text)
        text = re.sub(r"(?<=:)(\d{4,5})\b", lambda at: str(self._known(int(at[1]), host)), text)
        text = re.sub(r"(--(?:admin-|grpc-)?port )(\d+)", lambda at: f"{at[1]}{self.port(int(at[2]), host)}", text)
        if role := _ROLE.search(text):
            added = "" if "--admin-port" in text else f" --admin-port {self.port(ADMIN, host)}"
            if role[1] in ("serve", "gateway") and not re.search(r" --port\b", text):
                added += f" --port {self.port(PUBLIC)}"
            text = re.sub(r"(\s*&)?$", lambda end: f"{added}{end[0]}", text, count=1)
        return _ASKS.sub(rf"HEADWAY_ADMIN=http://127.0.0.1:{self.port(ADMIN, host)} \g<0>", text)

    def _known(self, number: int, host: str) -> int:
        """Return the port of this run for one of the documents. Other numbers stay."""
        known = self._foreign.union(port.number for port in self._ports.values())
        return number if number in known else self.port(number, host if number >= ADMIN else "")

    def _documented(self, text: str) -> str:
        """Return an output with the documents' addresses and ports."""
        real = {str(port.number): str(number) for (_, number), port in self._ports.items()}
        text = re.sub(r"\b\d{4,5}\b", lambda at: real.get(at[0], at[0]), text)
        for documented, stood in self._edits:
            text = text.replace(stood, documented)
        return re.sub(r"\b127\.0\.0\.1(\d)\b", r"10.0.0.\1", text)


def _started(script: str, folder: Path, environ: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a shell with a script, in a new session."""
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    the_reaper().watch(process.pid)
    return process


def checkout(folder: Path) -> None:
    """Make a folder look like a checkout with a `.venv`."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(BIN.parent)
