"""deploy/Containerfile: hadolint has nothing to say, and what it builds serves as uid 10001 where nothing can be written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.stand.stand import free_port
from tests.clients import environments
from tests.clients.environments import run_tool
from tests.deploy import containerfile
from tests.deploy.containerfile import FILE, ROOT, Stage, Tree, stages
from tests.dist import UPPER
from tests.e2e.client import PATIENCE, Connection, request, wait_until

MODEL = FILE.with_name("Containerfile.model")
USER = 10001


@pytest.fixture
def built() -> Iterator[Tree]:
    """What the file builds, where user 10001 can get."""
    environments.need("container")
    with tempfile.TemporaryDirectory(prefix="headway-image-") as folder:
        Path(folder).chmod(0o755)
        tree = Tree(Path(folder) / "image")
        made = environments.FOLDER / "container"
        shutil.copytree(made, tree.root, copy_function=_copy, symlinks=True)
        for script in (tree.root / "tools" / "bin").glob("pip*"):  # They name the folder in which they were made.
            text = script.read_text().replace(str(made), str(tree.root))
            script.unlink()
            script.write_text(text)
            script.chmod(0o755)
        build = stages()[0]
        for step in build.steps:
            if step.name == "COPY" and "lock" not in step.text:
                tree.copy(step.text, build)
            elif step.name == "RUN" and not containerfile.makes_known(step.text):
                tree.run(step.text, build, {})
        yield tree


@pytest.mark.processes
@pytest.mark.parametrize("path", [FILE, MODEL], ids=lambda path: str(path.name))
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    judged = run_tool("deploy", "hadolint", "--no-color", str(path))
    assert (judged.returncode, judged.stdout + judged.stderr) == (0, "")


def test_an_image_has_a_user_by_number_a_health_check_and_no_tools_of_its_build() -> None:
    build, result = stages()
    assert result.of("USER") == [f"{USER}:{USER}"]
    assert result.words("ENTRYPOINT") == ["headway"]
    assert result.words("HEALTHCHECK") == ["headway", "status"]
    assert result.of("COPY") == ["--from=build /opt/headway /opt/headway"]
    for text in build.of("RUN"):
        assert "pip install" not in text or "--require-hashes" in text or "--no-index" in text
    assert "PIP_NO_CACHE_DIR" in build.environment


def test_what_an_image_is_built_from_is_all_that_goes_to_the_engine() -> None:
    [docker, container] = ((ROOT / name).read_text() for name in (".dockerignore", ".containerignore"))
    assert docker == container
    everything, *lines = [line for line in docker.splitlines() if not line.startswith("#")]
    assert everything == "*"
    sources = {word for text in stages()[0].of("COPY") for word in text.split()[:-1]}
    assert {line[1:] for line in lines if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.processes
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes root, and setpriv of util-linux"
)
def test_what_is_built_serves_as_its_user_on_a_tree_that_it_cannot_write(built: Tree) -> None:
    if not containerfile.is_everybodys(Path(containerfile.python())):
        pytest.skip("there is no Python here that another user can run")
    result = stages()[-1]
    home = Path(built.place(result.of("WORKDIR")[0]))
    home.mkdir(parents=True)
    (home / "upper.py").write_text(UPPER)
    prefix = built.root / "opt" / "headway"
    assert not [path for path in (prefix / "bin").iterdir() if path.name.startswith(("pip", "gcc", "cc"))]
    assert not list(prefix.rglob("pip"))
    before = _state(built.root)
    port, admin = free_port(), free_port()
    environ = _environment(built, result) | {"HEADWAY_PORT": str(port), "HEADWAY_ADMIN_PORT": str(admin)}
    command = [*_as_user(), *result.words("ENTRYPOINT"), "serve", "upper.py:upper"]
    process = subprocess.Popen(
        command, cwd=home, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        check = [*_as_user(), *result.words("HEALTHCHECK")]
        told = {**environ, "HEADWAY_ADMIN": f"http://127.0.0.1:{admin}"}
        wait_until(lambda: process.poll() is not None or _healthy(check, home, told))
        assert process.poll() is None, process.communicate()[0]
        assert _owner(process.pid) == USER
        connection = Connection(port)
        connection.send(request(b'{"input": "hello"}'))
        assert connection.answer().json["output"] == "HELLO"
        connection.close()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.wait()
    assert _state(built.root) == before


def _copy(source: str, target: str) -> None:
    """Copy a file, by another name of it where that can be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _environment(tree: Tree, stage: Stage) -> dict[str, str]:
    return {name: tree.place(value) for name, value in stage.environment.items()} | {"HEADWAY_LAME_DUCK_MS": "0"}


def _as_user() -> list[str]:
    user = [
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]
    return ["setpriv", *user, "--"]


def _healthy(check: list[str], folder: Path, environ: dict[str, str]) -> bool:
    return subprocess.run(check, cwd=folder, env=environ, capture_output=True, timeout=PATIENCE).returncode == 0


def _owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def _state(root: Path) -> dict[str, int]:
    """Every file, and when it was last changed."""
    return {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}
