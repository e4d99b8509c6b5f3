"""A stand-in of NVIDIA's library for machines without a GPU: `pynvml.py` here, and the GPUs that it tells of.

    gpus = Gpus(tmp_path)
    gpus.write({"uuid": "GPU-1", "memory": (91, 100)})
    with serving(tmp_path, environ=gpus.environ): ...

A process that has the stand-in on its path imports it as `pynvml`; it reads the file of `gpus` at each call.
"""

import json
from pathlib import Path
from typing import Any

import headway

FOLDER = Path(__file__).parent
FILE = "STAND_IN_NVML"
"""Environment variable with the path of the file that tells of the GPUs."""


class Gpus:
    """Made-up GPUs of a machine, which the file `path` tells of."""

    def __init__(self, folder: Path, *gpus: dict[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "gpus.json"
        self.write(*gpus)

    def write(self, *gpus: dict[str, Any], **common: Any) -> None:
        """Have these GPUs from now on; their members are those that `pynvml.py` reads, as are those in common."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"gpus": gpus, **common}))
        fresh.replace(self.path)

    def environ(self, allotted: str) -> dict[str, str]:
        """Environment of a server that has these GPUs of them. Its machine has device files for eight."""
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
