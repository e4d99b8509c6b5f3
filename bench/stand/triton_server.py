"""Triton with its Python backend as a peer, from the wheel `nvidia-pytriton` in its own environment (`make triton`; glibc 2.35 or later).

Only that wheel's server, libraries and backend are used. It serves MODELS, the functions that Headway also serves, at most 64 inputs in a batch,
with a queue delay of 2 ms unless another is given. Everything else is at its default.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from bench.stand import stand
from bench.stand.processes import Process
from bench.stand.stand import Broken, Server

ROUTE = "/v2/models/upper/infer"
PYTHON = stand.ROOT / ".venv" / "triton" / "bin" / "python"
FUNCTIONS = stand.HERE / "triton" / "model.py"
MODELS = {
    "upper": ("text", "STRING", "1", "STRING", 1, 1),
    "floats": ("x", "FP32", "-1", "FP32", 2, 1),
    "pixels": ("x", "UINT8", "-1, -1, 3", "FP32", 2, 1),
}
"""Models by name: name, datatype and row of the input, datatype and row of the output, and processes."""
ENTRIES, BATCHES = "nv_inference_count_total", "nv_inference_exec_count_total"

_WHERE = """
import json, pathlib, site, sys, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
server = packages / "pytriton" / "tritonserver"
print(json.dumps({
    "server": str(server),
    "stub": str(server / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"),
    "libraries": [str(packages / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))],
}))
"""
_STUB = "triton_python_backend_stub"
_CONFIG = """
backend: "python"
max_batch_size: 64
input [ {{ name: "{}" data_type: TYPE_{} dims: [ {} ] }} ]
output [ {{ name: "output" data_type: TYPE_{} dims: [ {} ] }} ]
instance_group [ {{ count: {} kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: {} }}
"""


def body(length: int) -> bytes:
    """Return a request of exactly `length` bytes, in the JSON of Triton's protocol."""
    frame = b'{"inputs":[{"name":"text","shape":[1,1],"datatype":"BYTES","data":["%b"]}]}'
    text = b"the quick brown fox " * (length // 20)
    return frame % text[: length - len(frame) + 2]


def is_installed() -> bool:
    return PYTHON.exists()


@contextmanager
def upper(
    batch_ms: float = 0.0, grpc_port: int = 0, delay_ms: float = 2.0, names: Sequence[str] = ("upper",)
) -> Iterator[Server]:
    """Run Triton while the context lasts. `admin` is its metrics port. `grpc_port` 0 means no gRPC. `upper` must be among the models."""
    where = _where()
    port, metrics = stand.free_port(), stand.free_port()
    with tempfile.TemporaryDirectory(prefix="headway-bench-triton-") as folder:
        backends, models = Path(folder) / "backends", Path(folder) / "models"
        for name in names:
            (models / name / "1").mkdir(parents=True)
            shutil.copy(FUNCTIONS, models / name / "1")
            (models / name / "config.pbtxt").write_text(_CONFIG.format(*MODELS[name], round(delay_ms * 1000)))
        shutil.copytree(Path(where["server"]) / "backends", backends)
        shutil.copy(Path(where["stub"]) / _STUB, backends / "python" / _STUB)
        command = [f"{where['server']}/bin/tritonserver", f"--model-repository={models}"]
        command += [f"--backend-directory={backends}", "--exit-timeout-secs=5"]
        command += [f"--grpc-port={grpc_port}", "--grpc-address=127.0.0.1"] if grpc_port else ["--allow-grpc=false"]
        command += ["--http-address=127.0.0.1", f"--http-port={port}"]
        command += ["--metrics-address=127.0.0.1", f"--metrics-port={metrics}"]
        # The stub uses the packages of the first Python on the path.
        environment = {"LD_LIBRARY_PATH": ":".join(where["libraries"]), "PATH": f"{PYTHON.parent}:/usr/bin:/bin"}
        environment["EMULATED_MS"] = str(batch_ms)
        with Server("triton", command, _role, environment) as server:
            server.url, server.admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}"
            server.wait_for(lambda: _answers(server.url))
            yield server


def _where() -> dict[str, str]:
    done = subprocess.run([str(PYTHON), "-c", _WHERE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"Triton's environment does not work: {done.stderr[-1000:]}")
    places: dict[str, str] = json.loads(done.stdout)
    return places


def _answers(url: str) -> bool:
    request = body(115)
    try:
        with urlopen(f"{url}{ROUTE}", data=request, timeout=2) as answer:
            output = json.load(answer)["outputs"][0]["data"][0]
    except (HTTPError, URLError, OSError):
        return False
    return bool(output == json.loads(request)["inputs"][0]["data"][0].upper())


def _role(process: Process) -> str:
    return "gpu" if _STUB in process.command else "front"
