"""Parses deploy/Containerfile, and builds it with buildah on a base of Debian packages.

    with Engine(tmp_path) as engine:
        engine.build("headway", FILE, ROOT, PYTHON=engine.base())
        root, config = engine.image("headway")

Nothing is pulled, and there is no daemon. `make clients` makes the base (`tests.clients.environments`): it needs the network.
"""

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import headway
from tests.deploy.base import BASE, run

ROOT = Path(headway.__file__).parent.parent
FILE = ROOT / "deploy" / "Containerfile"
MODEL = FILE.with_name("Containerfile.model")
USER = 10001
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'
"""Which images may be used: all, because they are all built here."""


class Step(NamedTuple):
    """One instruction of the file: its name, and the rest on one line."""

    name: str
    text: str


@dataclass(frozen=True)
class Stage:
    """One stage of the file, starting at its FROM."""

    steps: tuple[Step, ...]

    def of(self, name: str) -> list[str]:
        return [step.text for step in self.steps if step.name == name]

    def words(self, name: str) -> list[str]:
        return list(json.loads(self.of(name)[-1].partition("[")[1] + self.of(name)[-1].partition("[")[2]))

    @property
    def environment(self) -> dict[str, str]:
        pairs = (word.partition("=") for text in self.of("ENV") for word in shlex.split(text))
        return {name: value for name, _, value in pairs}


def stages(path: Path = FILE) -> list[Stage]:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    steps = [Step(*line.split(None, 1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    starts = [at for at, step in enumerate(steps) if step.name == "FROM"]
    return [Stage(tuple(steps[start:end])) for start, end in zip(starts, [*starts[1:], None], strict=True)]


class Engine:
    """buildah with its own image store (some 2 GB), which is removed with the block. Its root file system is the image BASE."""

    def __init__(self, folder: Path, base: Path) -> None:
        self._folder, self._base = folder, base

    def build(self, name: str, file: Path, context: Path, **arguments: str) -> None:
        """Build an image from a file. The arguments are names of images in this store."""
        named = (f"--build-arg={key}=localhost/{value}" for key, value in arguments.items())
        # OCI has no health checks.
        how = ("--isolation=chroot", "--format=docker", "--pull=never", f"--signature-policy={self._policy}")
        self._buildah("build", *how, *named, f"--file={file}", f"--tag={name}", str(context))

    def image(self, name: str) -> tuple[Path, dict[str, Any]]:
        """Return the root file system of an image and its configuration. Files written there become part of the image."""
        told = json.loads(self._buildah("inspect", "--type=image", f"localhost/{name}"))
        return self._folder / "store" / "vfs" / "dir" / self._layer(name)["id"], told["Docker"]["config"]

    def layer_bytes(self, name: str) -> int:
        return int(self._layer(name)["diff-size"])

    def _layer(self, name: str) -> dict[str, Any]:
        """Return an image's last layer, read from the store, because a container would copy all files again."""
        images, layers = (
            json.loads((self._folder / "store" / f"vfs-{kind}" / f"{kind}.json").read_text())
            for kind in ("images", "layers")
        )
        [last] = [image["layer"] for image in images if f"localhost/{name}:latest" in image.get("names", ())]
        [found] = [layer for layer in layers if layer["id"] == last]
        return dict(found)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._policy = self._folder / "policy.json"
        self._policy.write_text(_POLICY)
        container = self._buildah("from", f"--signature-policy={self._policy}", "scratch")
        self._buildah("copy", "--quiet", container, str(self._base), "/")
        self._buildah("commit", "--quiet", "--rm", f"--signature-policy={self._policy}", container, BASE)
        return self

    def __exit__(self, *raised: object) -> None:
        shutil.rmtree(self._folder)

    def _buildah(self, *arguments: str) -> str:
        stores = f"--root={self._folder / 'store'}", f"--runroot={self._folder / 'run'}", "--storage-driver=vfs"
        return run("buildah", *stores, *arguments).strip()
