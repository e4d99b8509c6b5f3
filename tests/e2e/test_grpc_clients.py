"""The gRPC port and clients of others' making, each in an environment of its own, as their protobuf is not ours.

`make clients` makes the environments; without one its test is skipped.

    .venv/clients/triton     tritonclient, which registers the protocol's names in the default descriptor pool
    .venv/clients/grpc-js    @grpc/grpc-js, a stack that has no code in common with ours; it reads our .proto files
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.stand.stand import free_port
from tests.e2e.server import ROOT

pytestmark = pytest.mark.processes

CLIENTS = ROOT / ".venv" / "clients"
TRITON = CLIENTS / "triton" / "bin" / "python"
GRPC_JS = CLIENTS / "grpc-js"
SECONDS = 60.0

TRITON_PROGRAM = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1])
key = {"authorization": "Bearer " + sys.argv[2]}

def tensor(*texts):
    made = triton.InferInput("INPUT", [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object))
    return made

def status(ask):
    try:
        ask()
    except InferenceServerException as exc:
        return exc.status()

found = {
    "live": client.is_server_live(), "ready": client.is_server_ready(), "model": client.is_model_ready("default", headers=key),
    "server": client.get_server_metadata(as_json=True)["name"],
    "inputs": client.get_model_metadata("default", headers=key, as_json=True)["inputs"],
    "config": client.get_model_config("default", headers=key, as_json=True)["config"]["max_batch_size"],
    "index": client.get_model_repository_index(headers=key, as_json=True)["models"],
}
answer = client.infer("default", [tensor("a", "b")], request_id="7", outputs=[triton.InferRequestedOutput("OUTPUT")], headers=key)
found["infer"] = [answer.get_response().id, [one.decode() for one in answer.as_numpy("OUTPUT")]]
answer = client.infer("default", [tensor("zip" * 100)], compression_algorithm="gzip", headers=key, parameters={"n": 1}, priority=2)
found["compressed"] = answer.as_numpy("OUTPUT")[0].decode()
done = queue.Queue()
client.async_infer("default", [tensor("later")], lambda result, error: done.put((result, error)), headers=key)
result, error = done.get(timeout=30)
found["async"] = result.as_numpy("OUTPUT")[0].decode()
client.start_stream(lambda result, error: done.put((result, error)), headers=key)
for number in range(3):
    client.async_stream_infer("default", [tensor(f"s{number}")], request_id=str(number))
client.async_stream_infer("other", [tensor("x")])
told = [done.get(timeout=30) for _ in range(4)]
found["stream"] = [result.as_numpy("OUTPUT")[0].decode() for result, error in told[:3]]
found["stream error"] = "no model named" in str(told[3][1])
client.stop_stream()
found["statistics"] = int(client.get_inference_statistics("default", headers=key, as_json=True)["model_stats"][0]["inference_count"])
found["statuses"] = [
    status(lambda: client.infer("default", [tensor("a")])),
    status(lambda: client.infer("other", [tensor("a")], headers=key)),
    status(lambda: client.infer("default", [tensor("a")], model_version="9", headers=key)),
    status(lambda: client.infer("default", [tensor("a" * 3000000)], headers=key)),
    status(lambda: client.infer("default", [tensor("bad")], headers=key)),
    status(lambda: client.infer("default", [tensor("a")], client_timeout=0.0001, headers=key)),
    status(lambda: client.load_model("default", headers=key)),
    status(lambda: client.get_trace_settings(headers=key)),
]
print(json.dumps(found))
"""

GRPC_JS_PROGRAM = """
const [grpc, loader] = [require('@grpc/grpc-js'), require('@grpc/proto-loader')];
const [address, key, protos] = process.argv.slice(1);
const load = (file) => grpc.loadPackageDefinition(loader.loadSync(file, {includeDirs: [protos], keepCase: true, longs: Number}));
const plain = grpc.credentials.createInsecure();
const headway = new (load('headway/v1/inference.proto').headway.v1.Inference)(address, plain);
const triton = new (load('inference/open_inference.proto').inference.GRPCInferenceService)(address, plain);
const health = new (load('grpc/health/v1/health.proto').grpc.health.v1.Health)(address, plain);
const ask = (client, method, request, known = true, options = {}) => new Promise((resolve) => {
  const metadata = new grpc.Metadata();
  if (known) metadata.set('authorization', 'Bearer ' + key);
  client[method](request, metadata, options, (error, answer) => resolve(error || answer));
});
(async () => {
  const tensor = {name: 'INPUT', datatype: 'BYTES', shape: [2], contents: {bytes_contents: [Buffer.from('a'), Buffer.from('b')]}};
  const infer = await ask(triton, 'ModelInfer', {model_name: 'default', id: 'q', inputs: [tensor]});
  const found = {
    predict: (await ask(headway, 'Predict', {input_data: Buffer.from('hello')})).output.toString(),
    infer: [infer.id, infer.raw_output_contents[0].toString('hex')],
    health: (await ask(health, 'Check', {}, false)).status,
    stranger: (await ask(headway, 'Predict', {input_data: Buffer.from('a')}, false)).code,
    unknown: (await ask(headway, 'Predict', {model_id: 'other'})).code,
    late: (await ask(headway, 'Predict', {input_data: Buffer.from('a')}, true, {deadline: Date.now() + 1})).code,
  };
  console.log(JSON.stringify(found));
  const counts = {};
  const asking = async () => {
    for (;;) {
      const answer = await ask(headway, 'Predict', {input_data: Buffer.from('x')});
      if (answer.request_id) counts.ok = (counts.ok || 0) + 1;
      else if (/No connection established|ECONNREFUSED/.test(answer.details)) return;
      else counts[answer.details] = (counts[answer.details] || 0) + 1;
      if (counts.ok === 50) console.log('enough');
    }
  };
  await Promise.all(Array.from({length: 16}, asking));
  console.log(JSON.stringify(counts));
  process.exit(0);
})();
"""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """`headway serve` with a gRPC port and a key: the process, the address of the port, and the key."""
    keys = folder / "keys.toml"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    own = {"cwd": folder, "env": environment}
    command = [sys.executable, "-m", "headway"]
    made = [
        "keys",
        "create",
        "--keys",
        str(keys),
        "--user",
        "ada",
        "--tenant",
        "acme",
        "--tier",
        "paid",
        "--rate",
        "1000000/min",
    ]
    key = subprocess.run([*command, *made], capture_output=True, text=True, check=True, **own).stdout.split()[0]  # type: ignore[call-overload]
    (folder / "target.py").write_text(
        "def upper(inputs: list[str]) -> list:\n"
        "    return [ValueError('bad') if text == 'bad' else text.upper() for text in inputs]\n",
        encoding="utf-8",
    )
    port = free_port()
    served = [
        "serve",
        "target.py:upper",
        "--port",
        "0",
        "--admin-port",
        "0",
        "--grpc-port",
        str(port),
        "--keys",
        str(keys),
    ]
    served += ["--queue-timeout-ms", "30000", "--request-timeout-ms", "30000", "--log-level", "error"]
    with subprocess.Popen([*command, *served], stdout=subprocess.PIPE, **own) as process:  # type: ignore[call-overload]
        try:
            while b"Try it:" not in (line := process.stdout.readline()):
                assert line, "the service has ended"
            yield process, f"127.0.0.1:{port}", key
        finally:
            process.kill()


@pytest.mark.skipif(not TRITON.exists(), reason="there is no environment of tritonclient; make clients makes it")
def test_tritonclient_works_unchanged(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, address, key):
        done = subprocess.run(
            [str(TRITON), "-c", TRITON_PROGRAM, address, key],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    statuses = found.pop("statuses")
    assert found.pop("statistics") >= 7
    assert found == {
        "live": True,
        "ready": True,
        "model": True,
        "server": "headway",
        "inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": ["-1", "1"]}],
        "config": 1024,
        "index": [{"name": "default", "version": "1", "state": "READY"}],
        "infer": ["7", ["A", "B"]],
        "compressed": "ZIP" * 100,
        "async": "LATER",
        "stream": ["S0", "S1", "S2"],
        "stream error": True,
    }
    assert [status.removeprefix("StatusCode.") for status in statuses] == [
        "UNAUTHENTICATED",
        "NOT_FOUND",
        "NOT_FOUND",
        "RESOURCE_EXHAUSTED",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "UNIMPLEMENTED",
        "UNIMPLEMENTED",
    ]


@pytest.mark.skipif(
    not GRPC_JS.exists() or shutil.which("node") is None,
    reason="there is no node, or no environment of grpc-js; make clients makes it",
)
def test_grpc_js_works_and_no_call_of_its_is_cut_by_a_shutdown(tmp_path: Path) -> None:
    protos = str(ROOT / "headway" / "grpc" / "protos")
    with serving(tmp_path) as (process, address, key):
        client = subprocess.Popen(
            ["node", "-e", GRPC_JS_PROGRAM, address, key, protos],
            cwd=GRPC_JS,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with client:
            assert client.stdout is not None
            found = json.loads(client.stdout.readline())
            assert client.stdout.readline() == "enough\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
            counts = json.loads(client.stdout.readline())
    assert found == {
        "predict": "HELLO",
        "infer": ["q", "01000000410100000042"],
        "health": 1,
        "stranger": 16,
        "unknown": 5,
        "late": 4,
    }
    assert set(counts) == {"ok"}
