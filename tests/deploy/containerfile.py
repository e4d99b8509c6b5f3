"""Steps of deploy/Containerfile, carried out in a folder instead of in an image.

Paths of the image are below the folder, and commands are those of the file. What takes the network is done by `make clients`
(`tests.clients.environments`); the rest in a test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import headway

ROOT = Path(headway.__file__).parent.parent
FILE = ROOT / "deploy" / "Containerfile"
LOCKS = (ROOT / "requirements.lock", ROOT / "requirements-dist.lock")
TREES = ("src", "tools", "opt/headway", "dist", "srv/headway")
"""Folders of the image that the file names."""
_OWN = re.compile(rf"(?<![\w./}}-])/(?={'|'.join(TREES)})")


class Step(NamedTuple):
    """One instruction of the file: its name and what follows it, on one line."""

    name: str
    text: str


@dataclass(frozen=True)
class Stage:
    """One stage of the file, from its FROM on."""

    steps: tuple[Step, ...]

    def of(self, name: str) -> list[str]:
        """What follows each instruction of this name."""
        return [step.text for step in self.steps if step.name == name]

    def words(self, name: str) -> list[str]:
        """Words of the last instruction of this name, which has the form of a list."""
        return list(json.loads(self.of(name)[-1].partition("[")[1] + self.of(name)[-1].partition("[")[2]))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that it sets."""
        pairs = (word.partition("=") for text in self.of("ENV") for word in shlex.split(text))
        return {name: value for name, _, value in pairs}


def stages(path: Path = FILE) -> list[Stage]:
    """The stages of a file."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    steps = [Step(*line.split(None, 1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    starts = [at for at, step in enumerate(steps) if step.name == "FROM"]
    return [Stage(tuple(steps[start:end])) for start, end in zip(starts, [*starts[1:], None], strict=True)]


def makes_known(text: str) -> bool:
    """Whether a command takes the network."""
    return "requirements" in text


@cache
def python() -> str:
    """A Python that every user can run, as the one of an image is: this one, or the system's; else this one."""
    for path in (Path(sys.executable).resolve(), Path("/usr/bin/python3")):
        if is_everybodys(path) and _makes_environments(path):
            return str(path)
    return sys.executable


def is_everybodys(path: Path) -> bool:
    """Whether every user can get to a file."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def _makes_environments(path: Path) -> bool:
    known = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    return path.exists() and subprocess.run([path, "-c", known], capture_output=True).returncode == 0


class Tree:
    """Folders of the image below a folder.

    Arguments:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, text: str) -> str:
        """A text with the paths of the image below the folder."""
        return _OWN.sub(f"{self.root}/", text)

    def copy(self, text: str, stage: Stage) -> None:
        """Carry out a COPY out of the checkout."""
        *sources, target = text.split()
        [folder] = stage.of("WORKDIR")
        into = Path(self.place(folder)) / target
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, into)

    def run(self, text: str, stage: Stage, further: dict[str, str]) -> None:
        """Carry out a RUN.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        [folder] = stage.of("WORKDIR")
        command = self.place(re.sub(r"^python3 ", f"{python()} ", text))
        environ = {"PATH": os.defpath, "HOME": str(self.root), **further, **stage.environment}
        subprocess.run(
            ["/bin/sh", "-ec", command], cwd=self.place(folder), env=environ, check=True, capture_output=True, text=True
        )


def install(folder: Path) -> None:
    """Carry out what takes the network: packages by their locks.

    Raises:
        subprocess.CalledProcessError: a step failed.
    """
    build, tree = stages()[0], Tree(folder)
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    for step in build.steps:
        if step.name == "COPY" and "lock" in step.text:
            tree.copy(step.text, build)
        elif step.name == "RUN" and makes_known(step.text):
            tree.run(step.text, build, settings)
