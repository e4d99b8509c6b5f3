"""The base of the images that tests build: Debian packages, by debootstrap, which needs root and the network."""

import os
import shutil
import subprocess
from pathlib import Path

BASE = "base"
OF_THE_MACHINE = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pip.conf"))
"""Files that this machine needs to reach registries; they are copied to the base if they exist."""

UNUSED = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
"""Folders that no build needs."""


def make_base(folder: Path) -> None:
    """Make a root file system with Python and pip below /usr/local, as in the Python images. Raises an error if a step fails."""
    run("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", "bookworm", str(folder))
    for name in UNUSED:  # Each image and container has its own copy.
        shutil.rmtree(folder / name)
    for path in OF_THE_MACHINE:
        if path.exists():
            shutil.copy(path, f"{folder}{path}")
    run("chroot", str(folder), "python3", "-m", "venv", "/usr/local")


def run(*command: str) -> str:
    """Run a command that may be on root's path only. Returns its output."""
    environ = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            command, env=environ, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as exc:
        exc.add_note(exc.stdout[-2_000:] + exc.stderr[-2_000:])
        raise
    return done.stdout
