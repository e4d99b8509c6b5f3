"""A fake of the module `pynvml` of nvidia-ml-py, with the functions, constants and errors that Headway uses.
It reads the JSON file that `STAND_IN_NVML` names. `gpus` is a list of objects with optional members: `uuid`, `name`,
`memory` (bytes used and total), `gpu` (% busy), `power` (mW), `temperature`, `ecc`, `xids` (codes in order), `lost` (bool),
`known` (whether a lost GPU keeps its handle), `lacks` (unsupported functions) and `mig` (UUIDs of its parts).
If NVML fails to open, `fails` is the error number. `hangs` is the path of a FIFO that reads of a GPU's memory wait for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8  # noqa: N816


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


def _state() -> dict[str, Any]:
    return dict(json.loads(Path(os.environ["STAND_IN_NVML"]).read_text()))


def _gpu(handle: Any) -> dict[str, Any]:
    index, _ = handle
    gpu: dict[str, Any] = _state()["gpus"][index]
    if gpu.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return gpu


def _told(handle: Any, function: str, member: str) -> Any:
    """Return a member of a GPU, unless it lacks the function. Parts of a GPU only have `memory`."""
    gpu = _gpu(handle)
    if function in gpu.get("lacks", ()) or member not in gpu or (handle[1] and member != "memory"):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return gpu[member]


def nvmlInit() -> None:  # noqa: N802
    if fails := _state().get("fails"):
        raise NVMLError(fails)


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> Any:  # noqa: N802
    if index >= nvmlDeviceGetCount():
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    if not _state()["gpus"][index].get("known"):
        _gpu((index, ""))
    return index, ""


def nvmlDeviceGetHandleByUUID(uuid: str) -> Any:  # noqa: N802
    for index, gpu in enumerate(_state()["gpus"]):
        if uuid == gpu.get("uuid"):
            return index, ""
        if uuid in gpu.get("mig", ()):
            return index, uuid
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlDeviceIsMigDeviceHandle(device: Any) -> int:  # noqa: N802
    return int(bool(device[1]))


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(migDevice: Any) -> Any:  # noqa: N802, N803
    return migDevice[0], ""


def nvmlDeviceGetUUID(handle: Any) -> str:  # noqa: N802
    return str(handle[1] or _gpu(handle).get("uuid", ""))


def nvmlDeviceGetName(handle: Any) -> str:  # noqa: N802
    return str(_gpu(handle).get("name", "Stand-in"))


def nvmlDeviceGetMemoryInfo(handle: Any, version: int | None = None) -> Any:  # noqa: N802
    if hangs := _state().get("hangs"):
        Path(hangs).read_bytes()
    used, total = _told(handle, "nvmlDeviceGetMemoryInfo", "memory")
    return SimpleNamespace(used=used, free=total - used, total=total)


def nvmlDeviceGetUtilizationRates(handle: Any) -> Any:  # noqa: N802
    return SimpleNamespace(gpu=_told(handle, "nvmlDeviceGetUtilizationRates", "gpu"), memory=0)


def nvmlDeviceGetPowerUsage(handle: Any) -> int:  # noqa: N802
    return int(_told(handle, "nvmlDeviceGetPowerUsage", "power"))


def nvmlDeviceGetTemperature(handle: Any, sensor: int) -> int:  # noqa: N802
    assert sensor == NVML_TEMPERATURE_GPU
    return int(_told(handle, "nvmlDeviceGetTemperature", "temperature"))


def nvmlDeviceGetTotalEccErrors(handle: Any, errorType: int, counterType: int) -> int:  # noqa: N802, N803
    assert (errorType, counterType) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return int(_told(handle, "nvmlDeviceGetTotalEccErrors", "ecc"))


def nvmlEventSetCreate() -> Any:  # noqa: N802
    return []


def nvmlEventSetFree(eventSet: Any) -> None:  # noqa: N802, N803
    eventSet.clear()


def nvmlDeviceRegisterEvents(handle: Any, eventTypes: int, eventSet: Any) -> None:  # noqa: N802, N803
    assert eventTypes == nvmlEventTypeXidCriticalError
    gpu = _gpu(handle)
    if handle[1] or "nvmlDeviceRegisterEvents" in gpu.get("lacks", ()):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    eventSet.append([handle, len(gpu.get("xids", ()))])


def nvmlEventSetWait_v2(eventSet: Any, timeoutms: int) -> Any:  # noqa: N802, N803
    for registered in eventSet:
        handle, seen = registered
        if seen < len(xids := _gpu(handle).get("xids", ())):
            registered[1] += 1
            return SimpleNamespace(device=handle, eventType=nvmlEventTypeXidCriticalError, eventData=xids[seen])
    raise NVMLError(NVML_ERROR_TIMEOUT)
