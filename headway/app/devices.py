"""Assigns GPUs to worker processes. `CUDA_VISIBLE_DEVICES` lists the GPUs that this process may use; if it isn't set, the
process may use all GPUs of the machine. Each worker gets one GPU, in order, or the one that `devices` names for it. Workers
share a GPU only if `devices` names it more than once. On a machine without GPUs, workers run on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.config import Settings
from headway.config.fields import joined
from headway.config.settings import LOCAL, MOST_WORKERS
from headway.errors import SettingError

VISIBLE = "CUDA_VISIBLE_DEVICES"  # CUDA's environment variable for the GPUs that a process may use.
CPU = "cpu"  # Device of a worker that uses no GPU.

_NODE = re.compile(r"nvidia[0-9]+")
_OTHER_NODES = ("nvidiactl", "nvhost-gpu", "nvgpu", "nvmap", "dxg", "kfd")
_INDEX = re.compile(r"[0-9]{1,4}")
_GPU = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_NONE = re.compile(r"|-[0-9]+|none|void|NoDevFiles", re.IGNORECASE)  # Values of CUDA_VISIBLE_DEVICES that mean no GPU.


class Gpus(msgspec.Struct, frozen=True):
    """GPUs that this process may use. `ids` is None if there are GPUs, but their number is unknown. `allotted` is the value of
    CUDA_VISIBLE_DEVICES, or None if that isn't set. It is also None if the variable names GPUs, but there are none."""

    ids: tuple[str, ...] | None
    allotted: str | None = None
    warning: str = ""

    @property
    def source(self) -> str:
        """Phrase for error messages: where the ids come from."""
        return "this machine has" if self.allotted is None else f"{VISIBLE}={self.allotted} allows"

    @property
    def shown(self) -> str:
        """Phrase for error messages: a list of the ids."""
        return f"only GPU {', '.join(self.ids)}" if self.ids else "no GPU"


def find_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Gpus:
    """Find the GPUs that this process may use. `root` is the root of the file system, which has a device file for each GPU."""
    allotted = environ.get(VISIBLE)
    present = _present(root)
    if allotted is None:
        return Gpus(present)
    ids, wrong = _visible(allotted)
    if ids and present == ():
        return Gpus((), None, f"{VISIBLE}={allotted} names GPUs, but this machine has none: workers run on the CPU")
    warning = ""
    if wrong:
        effect = f"only GPU {', '.join(ids)} is used" if ids else "workers run on the CPU"
        warning = f"{VISIBLE}={allotted}: {wrong!r} is not a GPU id, and CUDA ignores it and what follows: {effect}"
    return Gpus(ids, allotted, warning)


def _visible(text: str) -> tuple[tuple[str, ...], str]:
    """Return the ids that CUDA reads in `text`. CUDA stops at an invalid id: also return that, or "" if it means no GPU."""
    ids: dict[str, None] = {}
    for part in map(str.strip, text.split(",")):
        if not _GPU.fullmatch(part):
            return tuple(ids), "" if _NONE.fullmatch(part) else part
        ids[part] = None
    return tuple(ids), ""


def _present(root: Path) -> tuple[str, ...] | None:
    for folder, pattern in (("dev", _NODE), ("proc/driver/nvidia/gpus", re.compile(".+"))):
        try:
            count = sum(pattern.fullmatch(entry.name) is not None for entry in (root / folder).iterdir())
        except OSError:
            continue
        if count:
            return tuple(map(str, range(count)))
    # Device files for other GPUs (WSL, AMD, Jetson) don't show how many there are.
    return None if any((root / "dev" / name).exists() for name in _OTHER_NODES) else ()


class Devices(msgspec.Struct, frozen=True):
    """Devices of a process's workers. `ids` has a GPU id or `cpu` for each worker. `most` limits the number of workers. Those
    beyond `ids` run on the CPU or, if `counted`, on the GPU with the worker's number. If `shared`, models take turns using
    the devices, each of which serves one worker at a time."""

    ids: tuple[str, ...]
    most: int
    counted: bool = False
    shared: bool = False

    def of(self, index: int) -> str:
        if index < len(self.ids):
            return self.ids[index]
        return str(index) if self.counted else CPU

    def shown(self, index: int) -> str:
        """Return the name of a worker's device as users see it."""
        device = self.of(index)
        return "CPU" if device == CPU else f"GPU {device}" if _INDEX.fullmatch(device) else device


NO_DEVICES = Devices((), MOST_WORKERS)  # For slots that need no device.


def allot(settings: Settings, gpus: Gpus) -> Devices:
    """Assign each worker its device. Raises SettingError if there are too few GPUs, or `devices` names a GPU that isn't allowed."""
    if settings.devices:
        for id in settings.device_ids:
            _check_allowed(settings, id, gpus)
        on_cpu = settings.autoscale == LOCAL and settings.devices == CPU
        return Devices(settings.device_ids, MOST_WORKERS if on_cpu else len(settings.device_ids))
    if gpus.ids is None:
        return Devices(tuple(map(str, range(settings.workers))), MOST_WORKERS, counted=True)
    if not gpus.ids:
        return Devices((CPU,) * settings.workers, MOST_WORKERS)
    if settings.workers > len(gpus.ids):
        raise _too_few(settings, gpus.ids, gpus)
    return Devices(gpus.ids, len(gpus.ids))


def allot_to_models(models: Mapping[str, Settings], gpus: Gpus) -> dict[str, Devices]:
    """Assign devices to the workers of several models. Models that name no devices get consecutive GPUs or, if one of these
    models may scale to zero, take turns using all GPUs. Raises SettingError if there are fewer GPUs than workers, or a
    model names a GPU that this process may not use."""
    devices, assigned = dict[str, Devices](), 0
    unnamed = [settings for settings in models.values() if not settings.devices]
    by_turns = bool(gpus.ids) and any(model.autoscale == LOCAL and not model.min_workers for model in unnamed)
    total = sum(map(_needed_by if by_turns else _reserved_for, unnamed))
    if gpus.ids and total > len(gpus.ids):
        count = f"{len(gpus.ids)} GPU{'' if len(gpus.ids) == 1 else 's'} ({', '.join(gpus.ids)})"
        hint = "Use fewer, or name the devices of each model in its table. Two models share a GPU if both name it."
        raise SettingError("workers", total, f"in total exceed the number of GPUs: {gpus.source} {count}", hint)
    for model, settings in models.items():
        if settings.devices or gpus.ids == ():
            devices[model] = allot(settings, gpus)
            continue
        if by_turns and gpus.ids:
            devices[model] = Devices(gpus.ids, len(gpus.ids), shared=True)
            continue
        end = assigned + _reserved_for(settings)
        ids = tuple(map(str, range(assigned, end))) if gpus.ids is None else gpus.ids[assigned:end]
        devices[model] = Devices(ids, len(ids))
        assigned = end
    return devices


def _reserved_for(settings: Settings) -> int:
    return max(settings.workers, settings.max_workers) if settings.autoscale == LOCAL else settings.workers


def _needed_by(settings: Settings) -> int:
    """Return how many GPUs a model needs at startup if models take turns, or 0 if the model may be without workers."""
    return settings.workers if settings.min_workers else 0


def _check_allowed(settings: Settings, id: str, gpus: Gpus) -> None:
    if id == CPU or gpus.ids is None or any(_same(id, other) for other in gpus.ids):
        return
    if gpus.allotted is None and not _INDEX.fullmatch(id):
        return  # Device files don't show ids of this kind.
    is_index = _INDEX.fullmatch(id) is not None
    if gpus.allotted is not None and gpus.ids and is_index not in {bool(_INDEX.fullmatch(other)) for other in gpus.ids}:
        return  # Ids of different kinds can't be compared, so trust the user.
    hint = f"Name {joined(gpus.ids, 'or')}, or cpu." if gpus.ids else "Leave it out, or name cpu."
    if gpus.allotted is not None:
        hint += f" If the GPU is yours, change {VISIBLE}."
    raise SettingError("devices", settings.devices, f"names GPU {id}, but {gpus.source} {gpus.shown}", hint)


def _same(id: str, other: str) -> bool:
    """Return True if two ids name the same GPU. CUDA accepts a prefix of a UUID, in either case."""
    id, other = id.lower(), other.lower()
    return id == other or (not _INDEX.fullmatch(id) and (id.startswith(other) or other.startswith(id)))


def _too_few(settings: Settings, ids: Sequence[str], gpus: Gpus) -> SettingError:
    count = f"{len(ids)} GPU{'' if len(ids) == 1 else 's'} ({', '.join(ids)})"
    shared = ",".join(ids[number % len(ids)] for number in range(settings.workers))
    hint = (
        f"Use --workers {len(ids)}. Or let workers share GPUs, each with its own copy of the model: --devices {shared}."
    )
    reason = f"is more than the number of GPUs: {gpus.source} {count}"
    return SettingError("workers", settings.workers, reason, f"{hint} Or use --devices cpu.")
