"""GPU figures from NVML, using a fake `pynvml` that the adapter imports like the real one."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from headway.backends.process import nvml
from headway.backends.process.nvml import READ_EVERY, STALE_AFTER, Nvml, NvmlGpu, NvmlGpus
from headway.model import GpuFigures
from tests import nvml as stand_in
from tests.e2e.client import Gate
from tests.nvml import FILE, FOLDER, Gpus
from tests.nvml import pynvml as library

GIB = 1 << 30
WHOLE: dict[str, Any] = {
    "uuid": "GPU-aa01", "name": "Stand-in 80", "memory": (60 * GIB, 80 * GIB), "gpu": 73, "power": 310_500, "temperature": 61, "ecc": 2,
}  # fmt: skip
TOLD = GpuFigures(
    uuid="GPU-aa01", name="Stand-in 80", memory_used=60 * GIB, memory_total=80 * GIB, utilisation=0.73, power=310.5, temperature=61,
    ecc_errors=2,
)  # fmt: skip


class Place:
    """A machine with GPUs, the adapter, and its clock `now`."""

    def __init__(self, folder: Path) -> None:
        self.gpus, self.now = Gpus(folder, WHOLE), 100.0
        self.nvml = NvmlGpus(lambda: self.now)

    def look(self, gpu: NvmlGpu) -> GpuFigures | None:
        return asyncio.run(gpu.look())

    def figures(self, gpu: NvmlGpu) -> GpuFigures:
        found = self.look(gpu)
        assert found is not None
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    place = Place(tmp_path)
    monkeypatch.setenv(FILE, str(place.gpus.path))
    monkeypatch.setattr(nvml, "LOOK_WITHIN", 30.0)
    yield place
    if place.nvml._thread is not None:
        asyncio.run(place.nvml._look())  # Let a read in progress finish.
    sys.modules.pop("pynvml", None)


def test_all_that_the_driver_tells_is_told_and_what_it_does_not_tell_is_none(place: Place) -> None:
    assert "pynvml" not in sys.modules, "a process that watches no GPU imports nothing"
    gpu = place.nvml.watch("0")
    assert gpu.figures() is None, "not read yet"
    assert place.look(gpu) == TOLD
    assert TOLD.memory_share == 0.75
    lacks = [one for one in dir(library) if one.startswith(("nvmlDeviceGetPower", "nvmlDeviceGetTot", "nvmlDeviceReg"))]
    place.gpus.write({**WHOLE, "lacks": lacks, "xids": [13]})
    other = NvmlGpus(lambda: 0.0).watch("0")
    found = place.figures(other)
    assert (found.power, found.ecc_errors, found.xids, found.utilisation) == (None, None, {}, 0.73)
    place.gpus.write({})
    assert place.look(other) == GpuFigures(uuid="GPU-aa01", name="Stand-in 80")


def test_a_gpu_is_found_by_number_uuid_its_beginning_or_part(place: Place) -> None:
    place.gpus.write(WHOLE, {**WHOLE, "uuid": "GPU-bb02", "mig": ["MIG-7"]})
    for device in ("1", "GPU-bb02", "GPU-b", "GPU-BB02", "MIG-7", "2", "GPU-c"):
        uuid = {"MIG-7": "MIG-7", "2": None, "GPU-c": None}.get(device, "GPU-bb02")
        with capture_logs() as logs:
            found = place.look(place.nvml.watch(device))
        assert (found and found.uuid) == uuid, device
        assert len(logs) == (uuid is None)


def test_a_part_of_a_gpu_has_its_own_memory_and_the_power_and_errors_of_the_whole(place: Place) -> None:
    gpu = place.nvml.watch("MIG-7")
    place.gpus.write({**WHOLE, "mig": ["MIG-7"]})
    place.look(gpu)
    place.gpus.write({**WHOLE, "mig": ["MIG-7"], "xids": [95]})
    found = place.figures(gpu)
    assert (found.memory_share, found.utilisation, found.power, found.xids) == (0.75, None, 310.5, {95: 1})


def test_unlike_gpus_are_told_apart_in_whatever_order_of_cuda(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.gpus.write({**WHOLE, "name": "slow"}, {**WHOLE, "uuid": "GPU-bb02", "name": "fast"})
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    with capture_logs() as logs:
        assert place.look(place.nvml.watch("0")) is None
        assert place.look(place.nvml.watch("0")) is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in logs[0]["hint"]
    assert place.look(place.nvml.watch("GPU-bb02")) is not None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert place.figures(NvmlGpus(lambda: 0.0).watch("0")).name == "slow"


def test_xid_errors_are_counted_once_each_from_the_first_look_on(place: Place) -> None:
    gpu = place.nvml.watch("0")
    place.gpus.write({**WHOLE, "xids": [31]})
    first = place.figures(gpu)
    place.gpus.write({**WHOLE, "xids": [31, 94, 31, 94]})
    place.look(gpu)
    second = place.figures(gpu)
    assert (first.xids, second.xids, second.lost) == ({}, {94: 2, 31: 1}, "")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"lost": True}, "its driver can no longer reach it"), ({"xids": [79]}, "Xid 79, it has fallen off the bus")],
)
def test_a_gpu_that_is_lost_stays_so_and_is_not_asked_again(place: Place, change: dict[str, Any], words: str) -> None:
    gpu = place.nvml.watch("0")
    place.look(gpu)
    place.gpus.write({**WHOLE, **change})
    found = place.figures(gpu)
    assert (found.lost, found.uuid) == (words, "GPU-aa01")
    if change == {"lost": True}:
        assert place.figures(NvmlGpus(lambda: 0.0).watch("0")).lost, "also when it was lost at the first look"
    place.gpus.write(WHOLE)
    place.now += STALE_AFTER
    assert place.look(gpu) == gpu.figures() == found


@pytest.mark.parametrize("order", ["", "PCI_BUS_ID"])
def test_another_gpu_that_is_lost_takes_nobody_out(place: Place, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    place.gpus.write(WHOLE, {"lost": True, "known": True})
    found = place.figures(place.nvml.watch("0"))
    assert (found.lost, found.uuid) == ("", "GPU-aa01")


def test_one_reading_is_good_for_all_who_watch_and_for_a_while(place: Place) -> None:
    gpu = place.nvml.watch("0")
    assert place.nvml.watch("0") is gpu
    place.look(gpu)
    place.gpus.write({**WHOLE, "gpu": 1})
    place.now += READ_EVERY / 2
    assert gpu.figures() == TOLD
    assert not place.nvml._pending, "nothing is read"
    place.now += READ_EVERY / 2
    assert gpu.figures() == TOLD, "what is read now is told next"
    found = place.figures(gpu)
    assert found.utilisation == 0.01


def test_memory_settles_at_what_is_in_use_after_a_load() -> None:
    now, asked = 100.0, list[bool]()

    def in_use(share: int) -> Nvml:
        return cast("Nvml", SimpleNamespace(read=lambda device: GpuFigures(memory_used=share, memory_total=100)))

    gpu = NvmlGpu("0", lambda: now, asked.append, lambda: None)
    gpu.read(in_use(60))
    now += 1.0
    gpu.loaded()
    gpu.figures()
    assert gpu.settled == 0.0, "it was read before"
    for share in (95, 97):
        gpu.read(in_use(share))
        gpu.figures()
    assert (gpu.settled, gpu._last) == (0.95, (101.0, GpuFigures(memory_used=97, memory_total=100)))


@pytest.mark.parametrize("fails", [0, library.NVML_ERROR_DRIVER_NOT_LOADED, library.NVML_ERROR_LIBRARY_NOT_FOUND])
def test_without_package_or_driver_one_line_is_told(place: Place, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    if fails:
        place.gpus.write(fails=fails)
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with capture_logs() as logs:
        gpu = place.nvml.watch("0")
        for _ in range(3):
            assert place.look(gpu) is gpu.figures() is None
    [line] = logs
    assert line["log_level"] == "info"
    if fails:
        assert line["event"] == "GPUs are not watched: NVML cannot be opened"
    else:
        assert line["hint"] == "Run pip install 'nvidia-ml-py>=12.575,<14'."
    assert place.nvml._asked.empty()


def test_a_library_of_another_kind_is_given_up_with_a_log_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = place.nvml.watch("0")
    place.look(gpu)
    monkeypatch.delattr(sys.modules["pynvml"], "nvmlDeviceGetMemoryInfo")
    with capture_logs() as logs:
        assert place.look(gpu) == place.look(gpu) == TOLD
        place.now += STALE_AFTER
        assert place.look(gpu) is None
    assert [line["log_level"] for line in logs] == ["error"]


def test_a_driver_that_hangs_delays_nobody_and_its_figures_go(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = place.nvml.watch("0")
    place.look(gpu)
    gate = Gate(place.gpus.folder, "gate")
    place.gpus.write(WHOLE, hangs=str(place.gpus.folder / "gate"))
    monkeypatch.setattr(nvml, "LOOK_WITHIN", 0.01)
    place.now += STALE_AFTER / 2
    assert place.look(gpu) == TOLD
    place.now += STALE_AFTER / 2
    assert place.look(gpu) is None
    gate.reached()
    monkeypatch.setattr(nvml, "LOOK_WITHIN", 30.0)
    place.gpus.write(WHOLE)
    gate.open()
    assert place.look(gpu) == TOLD


def test_the_stand_in_has_nothing_that_the_real_library_lacks() -> None:
    sys.path[:] = [path for path in sys.path if path != str(stand_in.FOLDER)]
    real = pytest.importorskip("pynvml")
    assert real.__file__ != library.__file__
    for name, own in vars(library).items():
        if not name.lower().startswith("nvml"):
            continue
        other = getattr(real, name)
        if isinstance(own, int):
            assert other == own, name
        elif inspect.isfunction(own):
            assert [*inspect.signature(inspect.unwrap(other)).parameters] == [*inspect.signature(own).parameters], name
    error = real.NVMLError(library.NVML_ERROR_GPU_IS_LOST)
    assert isinstance(error, real.NVMLError) and error.value == library.NVML_ERROR_GPU_IS_LOST
