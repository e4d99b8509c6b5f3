"""A fake NVIDIA library for machines without a GPU: the module `pynvml.py`, and the made-up GPUs that it reports.

    gpus = Gpus(tmp_path)
    gpus.write({"uuid": "GPU-1", "memory": (91, 100)})
    with serving(tmp_path, environ=gpus.environ): ...

A process with this folder on its path imports the fake as `pynvml`. It rereads the file of `gpus` on each call.
"""

import json
from pathlib import Path
from typing import Any

import headway

FOLDER = Path(__file__).parent
FILE = "STAND_IN_NVML"
"""Environment variable with the path of the file that tells of the GPUs."""


class Gpus:
    """Made-up GPUs of a machine, described in the file `path`."""

    def __init__(self, folder: Path, *gpus: dict[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "gpus.json"
        self.write(*gpus)

    def write(self, *gpus: dict[str, Any], **common: Any) -> None:
        """Replace the GPUs. `pynvml.py` lists their members and the `common` ones."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"gpus": gpus, **common}))
        fresh.replace(self.path)

    def environ(self, allotted: str) -> dict[str, str]:
        """Return the environment of a server that is allotted some of the GPUs. Its machine has device files for eight."""
        machine = self.folder / "machine" / "dev"
        machine.mkdir(parents=True, exist_ok=True)
        for number in range(8):
            (machine / f"nvidia{number}").touch()
        (self.folder / "sitecustomize.py").write_text(
            "import os\nfrom pathlib import Path\nfrom headway.app.devices import find_gpus\n"
            f"find_gpus.__defaults__ = (os.environ, Path({str(machine.parent)!r}))\n"
        )
        path = f"{self.folder}:{FOLDER}:{Path(headway.__file__).parent.parent}"
        return {"PYTHONPATH": path, FILE: str(self.path), "CUDA_VISIBLE_DEVICES": allotted}
