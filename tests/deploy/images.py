"""Images of deploy/, built by buildah: they are small, and serve as uid 10001 on a read-only root.

`make images` runs it. `make test` doesn't, because building takes minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments
from tests.deploy.base import BASE
from tests.deploy.containerfile import FILE, MODEL, ROOT, USER, Engine
from tests.dist import UPPER
from tests.e2e.client import PATIENCE, Connection, request, wait_until
from tests.servers.ports import Port
from tests.servers.reaper import the_reaper
from tests.servers.redis import lacking

LAYER_MB = 96
"""Maximum size of our own layers, in MB unpacked, as docs/deploy.md says."""


@pytest.mark.processes
@pytest.mark.timeout(560)  # It builds images, installs into them, and runs them.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root builds images and mounts them")
def test_images_are_built_small_and_serve_as_their_user_where_nothing_can_be_written(tmp_path: Path) -> None:
    environments.need("container")
    if shutil.which("buildah") is None:
        lacking("buildah is not on the path; on Debian and Ubuntu: apt-get install buildah")
    package, locked = _further_package()
    (tmp_path / "model.lock").write_text(locked)
    (tmp_path / "model.py").write_text(f"import {package}\n\n\n{UPPER.replace('def upper', 'def Model')}")
    (tmp_path / "upper.py").write_text(UPPER)
    with (
        tempfile.TemporaryDirectory(prefix="headway-image-") as folder,
        Engine(Path(folder) / "engine", environments.FOLDER / "container" / BASE) as engine,
    ):
        engine.build("headway", FILE, ROOT, PYTHON=BASE)
        assert engine.layer_bytes("headway") <= LAYER_MB * 1e6
        _answers(*engine.image("headway"), tmp_path / "upper.py", "serve", "upper.py:upper")
        engine.build("model", MODEL, tmp_path, HEADWAY="headway", PYTHON=BASE)
        _answers(*engine.image("model"))


def _further_package() -> tuple[str, str]:
    """Return the name of a package that the image doesn't have, and its lock."""
    name = "sortedcontainers"
    assert f"{name}==" not in (ROOT / "requirements.lock").read_text()
    [entry] = re.findall(
        rf"^{name}==.*\n(?:    --hash.*\n)+", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE
    )
    return name, entry


def _answers(root: Path, config: dict[str, Any], target: Path | None = None, *arguments: str) -> None:
    """Run an image as an engine would, with a read-only root and /tmp in memory, and send a request."""
    prefix = root / "opt" / "headway"
    assert not [path for path in (prefix / "bin").iterdir() if path.name.startswith(("pip", "gcc", "cc"))]
    assert not list(prefix.rglob("pip"))
    assert config["User"] == f"{USER}:{USER}"
    if target is not None:  # An engine creates the file that it mounts on.
        (root / "srv" / "headway" / target.name).touch()
    held = Port(), Port()
    port, admin = (one.number for one in held)
    own = {"HEADWAY_PORT": str(port), "HEADWAY_ADMIN_PORT": str(admin), "HEADWAY_LAME_DUCK_MS": "0"}
    environ = [*config["Env"], *(f"{name}={value}" for name, value in own.items())]
    command = _contained(root, config["WorkingDir"], target, environ)
    process = subprocess.Popen(
        [*command, *config["Entrypoint"], *(arguments or config["Cmd"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    the_reaper().watch(process.pid)
    try:
        _, *check = config["Healthcheck"]["Test"]
        wait_until(lambda: process.poll() is not None or _healthy([*command, *check]))
        assert process.poll() is None, process.communicate()[0]
        assert Path(f"/proc/{process.pid}").stat().st_uid == USER
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
        if target is not None:
            (root / "srv" / "headway" / target.name).unlink()
        the_reaper().forget(process.pid)
        for one in held:
            one.close()


def _contained(root: Path, folder: str, target: Path | None, environ: list[str]) -> list[str]:
    """Return the start of a command line that runs in an image, with the machine's network."""
    mounts = [
        f"mount --bind {root} {root}",
        f"mount -o remount,bind,ro {root}",
        f"mount -t tmpfs tmpfs {root}/tmp",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        *([f"mount --bind -o ro {target} {root}{folder}/{target.name}"] if target else []),
        f'exec chroot {root} "$@"',
    ]
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]
    own = [*user, "--bounding-set=-all", "--", "env", "-i", f"--chdir={folder}", *environ]
    return ["unshare", "--mount", "sh", "-ec", "\n".join(mounts), "sh", *own]


def _healthy(check: list[str]) -> bool:
    return subprocess.run(check, capture_output=True, timeout=PATIENCE).returncode == 0
