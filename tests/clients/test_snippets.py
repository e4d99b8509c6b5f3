"""The documents' snippets for each client, run unchanged in the client's environment against a service."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import HERE, client_command
from tests.docs.pages import ROOT, Block, blocks
from tests.e2e.client import PATIENCE
from tests.e2e.server import launched
from tests.servers.ports import Port

ENVIRONMENTS = {
    "from openai import": "openai",
    "from langchain_openai import": "openai",
    "tritonclient": "triton",
    "from kserve import": "kserve",
    "@grpc/grpc-js": "grpc-js",
    "import grpc\n": "",
}
"""The environment of a snippet, by a string in its code; empty: our own."""
PAGES = "openai.md", "grpc.md", "oip.md"
SHOWN = {"openai": "", "triton": "ONE", "kserve": "ONE", "grpc-js": "HELLO", "": "HELLO"}
"""A part of what a snippet prints."""


def snippets() -> list[tuple[Block, str]]:
    """Return the documents' blocks, with the environment of each."""
    return [
        (block, environment)
        for page in PAGES
        for block in blocks(ROOT / "docs" / page)
        if block.language in ("python", "js")
        for said, environment in ENVIRONMENTS.items()
        if said in block.text
    ]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("snippets")
    with (
        contextlib.closing(Port()) as port,
        launched(folder, "--grpc-port", str(port.number), target="tests.clients.targets:shown") as server,
    ):
        server.ready()
        yield {":8000": f":{server.port}", ":8081": f":{port.number}"}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of code generated as docs/grpc.md says, in place of its `stubs`."""
    folder = tmp_path_factory.mktemp("made")
    [made] = [block for block in blocks(ROOT / "docs" / "grpc.md") if "grpc_tools" in block.text]
    command = made.text.replace("stubs", str(folder / "stubs")).replace("python ", f"{shlex.quote(sys.executable)} ")
    subprocess.run(command, shell=True, cwd=ROOT, check=True, timeout=PATIENCE)
    return str(folder / "stubs")


def test_each_client_has_a_snippet() -> None:
    assert {environment for _, environment in snippets()} == set(ENVIRONMENTS.values())


def with_ports(text: str, ports: dict[str, str]) -> str:
    for documented, real in ports.items():
        text = text.replace(documented, real)
    return text


def printed(block: Block, environment: str, ports: dict[str, str], folder: Path, stubs: str = "") -> str:
    """Run a block of a page with only its ports changed. Returns what it prints."""
    program = folder / f"snippet.{'js' if block.language == 'js' else 'py'}"
    program.write_text(with_ports(block.text, ports), encoding="utf-8")
    command, environ = [sys.executable, str(program)], {"PYTHONPATH": stubs}
    if environment:
        command, environ = client_command(environment, str(program))
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environ, capture_output=True, text=True, timeout=5 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


@pytest.mark.parametrize(
    ("block", "environment"), snippets(), ids=lambda one: f"{one.page}:{one.line}" if isinstance(one, Block) else one
)
def test_a_snippet_runs(block: Block, environment: str, ports: dict[str, str], stubs: str, tmp_path: Path) -> None:
    assert SHOWN[environment] in printed(block, environment, ports, tmp_path, stubs)
