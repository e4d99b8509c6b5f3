"""`make dist`: builds a wheel and a source archive in dist/, checks them, and serves from a clean environment.

The wheel is built from the source archive, so a file missing there shows. It is installed by the hashes of its requirements
into a separate environment, and started in an empty folder with no settings.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements.lock"
UPPER = "def upper(inputs: list[str]) -> list[str]:\n    return [text.upper() for text in inputs]\n"
PATIENCE = 60.0


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source archive in `folder`, and the wheel from it. Returns their paths."""
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", str(folder.resolve())]
    subprocess.run([*hatchling, "-t", "sdist"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    [archive] = folder.glob("headway-*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(archive) as members:
            # `extractall` has this parameter only since 3.11.4.
            members.extraction_filter = getattr(tarfile, "data_filter", None)
            members.extractall(unpacked)
        [source] = Path(unpacked).iterdir()
        subprocess.run([*hatchling, "-t", "wheel"], cwd=source, check=True, stdout=subprocess.DEVNULL)
    [wheel] = folder.glob("headway-*.whl")
    return archive, wheel


def faults(archive: Path, wheel: Path) -> list[str]:
    """Return which files are missing from the source archive or the wheel, or shouldn't be there."""
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "headway").rglob("*") if _is_source(path)}
    with zipfile.ZipFile(wheel) as members:
        packed = {name for name in members.namelist() if ".dist-info/" not in name}
        information = {name.partition(".dist-info/")[2] for name in members.namelist()} - {""}
    with tarfile.open(archive) as listed:
        names = {name.partition("/")[2] for name in listed.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", LOCK} | sources
    found = {
        "not in the wheel": sources - packed,
        "in the wheel": packed - sources,
        "not in the wheel's information": {"METADATA", "entry_points.txt", "licenses/LICENSE"} - information,
        "not in the archive": wanted - names,
        "in the archive": {name for name in names if name.split("/")[0] in ("tests", "bench", ".venv", ".git", "dist")},
    }
    return [f"{where}: {', '.join(sorted(what))}" for where, what in found.items() if what]


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"


def try_out(wheel: Path, lock: Path) -> str:
    """Install a wheel with its locked requirements into a new environment, and serve from it. Returns how that went."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", str(home / "env")], check=True)
        pip = [str(home / "env/bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--require-hashes", "-r", str(lock)], check=True)
        subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
        size = sum(
            path.stat().st_size for path in (home / "env").rglob("*") if path.is_file() and not path.is_symlink()
        )
        (home / "empty").mkdir()
        (home / "empty/upper.py").write_text(UPPER)
        seconds = serve(home / "empty", [str(home / "env/bin/headway")], {"PATH": os.defpath, "HOME": folder})
    return f"installed in {size / 1e6:.0f} MB; the first answer {seconds:.1f} s after the start"


def serve(folder: Path, headway: Sequence[str], environ: dict[str, str], expected: str = "HELLO") -> float:
    """Serve `upper.py:upper` of a folder, send one request, and stop. Returns the seconds from start to answer."""
    begun = time.monotonic()
    command = [*headway, "serve", "upper.py:upper", "--port", "0", "--admin-port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            address = next((found[1] for line in process.stdout if (found := re.search(r"public +(\S+)", line))), None)
            assert address, "it ended without serving"
            asked = urllib.request.Request(f"{address}/v1/inference", b'{"input": "hello"}')
            with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                output = json.load(answer)["output"]
            seconds = time.monotonic() - begun
        finally:
            process.terminate()
    assert output == expected, output
    assert process.returncode == 0, process.returncode
    return seconds


def main() -> None:
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    archive, wheel = build(folder)
    shutil.copy(ROOT / LOCK, folder)
    wrong = faults(archive, wheel)
    if wrong:
        sys.exit("\n".join(wrong))
    plain = [] if sys.stdout.isatty() else ["--no-color"]  # Twine treats any output as a terminal.
    twine = [sys.executable, "-m", "twine", *plain, "check", "--strict", str(archive), str(wheel)]
    subprocess.run(twine, check=True)
    sys.stdout.write(f"{wheel.name} {try_out(wheel, folder / LOCK)}\n")


if __name__ == "__main__":
    main()
