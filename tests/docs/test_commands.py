"""Every command of the documents is tried as a reader would, or parsed; none is left out."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Block, Command, blocks, commands
from tests.docs.parsing import parse, unknown_flags
from tests.docs.session import Reader, checkout
from tests.docs.table import Remember, Run, Start, how
from tests.servers.redis import RedisServer, lacking

SHOUTER = "class Shouter:\n    def __call__(self, inputs: list[str]) -> list[str]:\n        return [*map(str.upper, inputs)]\n"
UPPER = """
import os, pathlib

def upper(inputs: list[str]) -> list[str]:
    if "crash" in inputs:
        os._exit(3)
    if "bad" in inputs and not pathlib.Path("mended").exists():
        raise ValueError("cannot digest this")
    return [text.upper() for text in inputs]
"""
"""The target that operators encounter."""
SERVES = ("headway serve upper.py:upper",)
GIVEN = {
    "docs/http.md": SERVES,
    "docs/oip.md": SERVES,
    "docs/errors.md": SERVES,
    "docs/operations.md": (
        "headway serve upper.py:upper --workers 2",
        """curl http://127.0.0.1:8000/v1/inference -d '{"input": "bad"}'""",
        """curl http://127.0.0.1:8000/v1/inference -d '{"input": "crash", "parameters": {"lang": "de"}}'""",
        "touch mended",
    ),
}
"""What a page's reader has done before."""
READ_BEFORE = ("docs/guide.md", "docs/targets.md")
"""Pages whose Python files the reader has."""


def every(page: Path) -> list[tuple[Block, list[Command]]]:
    return [(block, commands(block) if block.is_shell else []) for block in blocks(page)]


def of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_COMMANDS = [page for page in PAGES if any(found for _, found in every(page))]


def test_it_is_said_of_every_command_how_it_is_tried() -> None:
    every_command = [command for page in WITH_COMMANDS for _, found in every(page) for command in found]
    unsaid = [str(command) for command in every_command if how(command) is None]
    assert unsaid == [], "say in ROWS of tests/docs/table.py how they are tried"


def test_every_command_within_a_sentence_has_the_flags_that_it_names() -> None:
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for text in re.findall(r"`headway ([a-z]+(?: [^`…|]*)?)`", prose):
            assert unknown_flags(text.split()) == set(), f"{page}: {text}"


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    """The reader of the test's page, with what the page expects to be there."""
    page = of(request.param)
    for program in ("curl", "openssl"):
        if any(f"{program} " in block.text for block in blocks(request.param)) and not shutil.which(program):
            lacking(
                f"{program}, which the page uses, is not on the path; on Debian and Ubuntu: apt-get install {program}"
            )
    checkout(tmp_path)
    with ExitStack() as stack:
        it = Reader(tmp_path, installed=page != "README.md", home="store" if page == "docs/fleet.md" else "")
        stack.callback(it.close)
        for block in (block for read_before in READ_BEFORE for block in blocks(ROOT / read_before)):
            if page.startswith("docs/") and (block.file or "").endswith(".py"):
                it.keep(block)
        if page == "docs/operations.md":
            (tmp_path / "targets.py").write_text(SHOUTER)
            (tmp_path / "upper.py").write_text(UPPER)
        elif page == "docs/fleet.md":
            shutil.copy(ROOT / "examples" / "emulated_gpu.py", tmp_path / "model.py")
        if page in ("docs/fleet.md", "docs/rollouts.md", "docs/guide.md", "README.md"):
            users = [
                line for block in blocks(request.param) for line in block.text.splitlines() if line.startswith("user ")
            ]
            server = stack.enter_context(RedisServer("valkey", tmp_path / "redis", *users[1:]))
            it.stands_for("10.0.0.1:6379", f"127.0.0.1:{server.port}")
            it.stands_for("127.0.0.1:6379", f"127.0.0.1:{server.port}")
        for text in GIVEN.get(page, ()):
            act = it.start if text.startswith("headway serve") else it.run
            act(Command(page, 0, "", text))
        yield it


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reader", "page"), [(page, page) for page in WITH_COMMANDS], ids=map(of, WITH_COMMANDS), indirect=["reader"]
)
def test_every_command_does_what_the_page_shows(reader: Reader, page: Path) -> None:
    for block, found in every(page):
        reader.keep(block)
        for command in found:
            match how(command):
                case Run(edits, compares, optional) if not optional or shutil.which(command.text.split()[0]):
                    reader.run(command, edits, compares)
                case Start(edits):
                    reader.start(command, edits)
                case Remember():
                    reader.remember(command)
                case _:
                    parse(command.text)
