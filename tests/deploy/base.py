"""Base of the images that tests build: Debian's packages, by debootstrap, which takes root and the network."""

import os
import shutil
import subprocess
from pathlib import Path

BASE = "base"
OF_THE_MACHINE = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pip.conf"))
"""How this machine reaches registries; the base has it too, where it is there."""

UNUSED = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
"""Folders that no build needs."""


def make_base(folder: Path) -> None:
    """Make a root file system that has Python with pip below /usr/local, as the images of Python have them; raises where a step
    fails."""
    run("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", "bookworm", str(folder))
    for name in UNUSED:  # Every image and every container has a copy.
        shutil.rmtree(folder / name)
    for path in OF_THE_MACHINE:
        if path.exists():
            shutil.copy(path, f"{folder}{path}")
    run("chroot", str(folder), "python3", "-m", "venv", "/usr/local")


def run(*command: str) -> str:
    """What a command prints, which users other than root may not have on their path."""
    environ = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            command, env=environ, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as exc:
        exc.add_note(exc.stdout[-2_000:] + exc.stderr[-2_000:])
        raise
    return done.stdout
