"""GPUs through NVML, NVIDIA's interface to its driver: memory, load, power, temperature, errors, and whether a GPU is lost.

NVML comes with the driver, and the optional package nvidia-ml-py gives access to it. Calls may take tens of milliseconds, or forever
if the driver hangs. So one thread makes all calls, and nobody waits longer than LOOK_WITHIN.

    figures() ──outdated──▶ thread reads all GPUs ──▶ the next figures() returns the new stats

A lost GPU stays lost until somebody resets it or restarts the machine. NVML must then be opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from headway.config.extras import install_hint
from headway.model import GpuFigures
from headway.ports import Gpu
from headway.runtime.logger import get_logger

log = get_logger(__name__)

READ_EVERY = 0.9  # For how many seconds a reading is used.
STALE_AFTER = 10.0  # Seconds after which a reading is no longer reported.
LOOK_WITHIN = 1.0  # Maximum seconds to wait for a reading.
FALLEN_OFF = 79  # Xid error code of a GPU that has fallen off the bus.
MOST_EVENTS = 100  # Maximum number of Xid errors per GPU and reading.
ORDER, BY_PLACE = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"  # Setting that makes CUDA number GPUs like NVML does.


class NvmlGpus:
    """The GPUs of one process's workers. Until the first reading, it imports nothing and starts no thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: dict[str, NvmlGpu] = {}
        self._asked = SimpleQueue[asyncio.Future[None] | None]()
        self._thread: threading.Thread | None = None
        self._pending = self._closed = False

    def watch(self, device: str) -> NvmlGpu:
        """Return the GPU with this id, as in CUDA_VISIBLE_DEVICES. All calls for a GPU return the same object."""
        if device not in self._watched:
            self._watched[device] = NvmlGpu(device, self._clock, self._ask, self._look)
        return self._watched[device]

    def _ask(self, fresh: bool = False) -> None:
        """Request a reading of all GPUs soon. If `fresh`, a pending request isn't enough, as its reading may have begun."""
        if (fresh or not self._pending) and not self._closed:
            self._pending = True
            self._put(None)

    async def _look(self) -> None:
        if self._closed:
            return
        done = asyncio.get_running_loop().create_future()
        self._put(done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_WITHIN):
                await done

    def _put(self, done: asyncio.Future[None] | None) -> None:
        if self._thread is None:  # It is a daemon because a call to NVML may never return.
            self._thread = threading.Thread(target=self._read_on, name="nvml", daemon=True)
            self._thread.start()
        self._asked.put(done)

    def _read_on(self) -> None:
        nvml = _opened()
        while True:
            done = self._asked.get()
            try:
                self._closed = nvml is None
                if nvml is not None:
                    for gpu in tuple(self._watched.values()):
                        gpu.read(nvml)
            except Exception:  # NVML may have an unknown version.
                log.exception("GPUs are no longer watched: NVML misbehaved")
                nvml, self._closed = None, True
            if done is None:
                self._pending = False
            else:
                with contextlib.suppress(RuntimeError):  # The waiter's loop has ended.
                    done.get_loop().call_soon_threadsafe(_finish, done)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _opened() -> Nvml | None:
    try:
        return Nvml()
    except ImportError:
        log.info("GPUs are not watched: the package nvidia-ml-py is not installed", hint=install_hint("gpu"))
    except Exception as exc:  # The module may have any version, and raise anything.
        log.info("GPUs are not watched: NVML cannot be opened", error=str(exc))
    return None


class NvmlGpu(Gpu):
    """One GPU. For `ask` and `look`, see `NvmlGpus`."""

    def __init__(
        self, device: str, clock: Callable[[], float], ask: Callable[[bool], None], look: Callable[[], Any]
    ) -> None:
        self._device, self._clock, self._ask, self._look = device, clock, ask, look
        self._last: tuple[float, GpuFigures] | None = None
        """Start time and result of the last reading. Only the reading thread sets this."""
        self._loaded_at = 0.0
        self._settled: float | None = None

    @property
    def settled(self) -> float:
        return self._settled or 0.0

    def figures(self) -> GpuFigures | None:
        last, now = self._last, self._clock()
        if last is None or (now - last[0] >= READ_EVERY and not last[1].lost):
            self._ask(False)
        if last is None or (now - last[0] >= STALE_AFTER and not last[1].lost):
            return None
        at, figures = last
        if self._settled is None and at >= self._loaded_at:
            self._settled = figures.memory_share
        return figures

    async def look(self) -> GpuFigures | None:
        await self._look()
        return self.figures()

    def loaded(self) -> None:
        """Record that a model was loaded, and read the GPU before the first batches allocate memory."""
        self._loaded_at, self._settled = self._clock(), None
        self._ask(True)

    def read(self, nvml: Nvml) -> None:
        """Read the GPU, in the reading thread. A lost GPU isn't read again."""
        if self._last is None or not self._last[1].lost:
            at = self._clock()
            if (figures := nvml.read(self._device)) is not None:
                self._last = at, figures


class _Lost(Exception):
    """The driver reports a GPU as lost."""


class Nvml:
    """Open NVML, for use in one thread. Raises ImportError without nvidia-ml-py, or an NVML error without the driver."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        self._opened: dict[str, _Handles | None] = {}

    def read(self, device: str) -> GpuFigures | None:
        """Read a GPU. Return None if it is unclear which GPU `device` means."""
        try:
            if device not in self._opened:
                self._opened[device] = self._open(device)
            handles = self._opened[device]
        except _Lost as exc:
            return GpuFigures(lost=str(exc))
        return None if handles is None else self._read(handles)

    def _read(self, handles: _Handles) -> GpuFigures:
        try:
            self._count_events(handles)
            figures = self._figures(handles)
        except _Lost as exc:
            figures = GpuFigures(lost=str(exc))
        lost = f"Xid {FALLEN_OFF}, it has fallen off the bus" if FALLEN_OFF in handles.xids else figures.lost
        return replace(figures, uuid=handles.uuid, name=handles.name, xids=dict(handles.xids), lost=lost)

    def _figures(self, handles: _Handles) -> GpuFigures:
        nvml, part, whole = self._nvml, handles.part, handles.whole
        memory = self._call(nvml.nvmlDeviceGetMemoryInfo, part)
        rates = self._call(nvml.nvmlDeviceGetUtilizationRates, part)
        power = self._call(nvml.nvmlDeviceGetPowerUsage, whole)
        return GpuFigures(
            memory_used=None if memory is None else memory.used,
            memory_total=None if memory is None else memory.total,
            utilisation=None if rates is None else rates.gpu / 100,
            power=None if power is None else power / 1000,
            temperature=self._call(nvml.nvmlDeviceGetTemperature, whole, nvml.NVML_TEMPERATURE_GPU),
            ecc_errors=self._call(
                nvml.nvmlDeviceGetTotalEccErrors, whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        )

    def _count_events(self, handles: _Handles) -> None:
        for _ in range(MOST_EVENTS if handles.events is not None else 0):
            event = self._call(self._nvml.nvmlEventSetWait_v2, handles.events, 0)
            if event is None:  # There is no further event.
                return
            handles.xids[event.eventData] = handles.xids.get(event.eventData, 0) + 1

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call an NVML function. Return None if the GPU has no such value or event. Raises _Lost."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as exc:
            if exc.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise _Lost("its driver can no longer reach it") from None
            return None

    def _open(self, device: str) -> _Handles | None:
        part = self._find(device)
        if part is None:
            log.info("a GPU is not watched: it is unknown to NVML", gpu=device)
            return None
        nvml = self._nvml
        whole = part
        if self._call(nvml.nvmlDeviceIsMigDeviceHandle, part):
            whole = self._call(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part) or part
        events = self._call(nvml.nvmlEventSetCreate)
        if events is not None:
            try:
                nvml.nvmlDeviceRegisterEvents(whole, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:  # Some GPUs, drivers and systems don't report them.
                nvml.nvmlEventSetFree(events)
                events = None
        uuid, name = self._call(nvml.nvmlDeviceGetUUID, part), self._call(nvml.nvmlDeviceGetName, whole)
        return _Handles(part, whole, events, uuid or "", name or "")

    def _find(self, device: str) -> Any:
        """Return the handle of a GPU, or None if NVML doesn't know it, or may number GPUs differently from CUDA."""
        nvml = self._nvml
        if device.startswith("MIG-"):
            return self._call(nvml.nvmlDeviceGetHandleByUUID, device)
        if not device.isdecimal():  # CUDA accepts a prefix of a UUID, in either case.
            ids = ((handle, self._call(nvml.nvmlDeviceGetUUID, handle) or "") for handle in self._all())
            return next((handle for handle, uuid in ids if uuid.lower().startswith(device.lower())), None)
        if os.environ.get(ORDER) != BY_PLACE and len(self._names()) > 1:
            hint = f"Set {ORDER}={BY_PLACE}, or name GPUs by their UUIDs."
            log.info("CUDA and NVML may number GPUs of different kinds differently", gpu=device, hint=hint)
            return None
        return self._call(nvml.nvmlDeviceGetHandleByIndex, int(device))

    def _names(self) -> set[str | None]:
        names = set()
        for handle in self._all():
            with contextlib.suppress(_Lost):
                names.add(self._call(self._nvml.nvmlDeviceGetName, handle))
        return names

    def _all(self) -> list[Any]:
        handles = []
        for index in range(self._call(self._nvml.nvmlDeviceGetCount) or 0):
            with contextlib.suppress(_Lost):
                handles.append(self._call(self._nvml.nvmlDeviceGetHandleByIndex, index))
        return [handle for handle in handles if handle is not None]


class _Handles:
    """Handles of one GPU: the part that a worker uses (MIG), the whole GPU, and its events. `xids` counts its Xid errors."""

    def __init__(self, part: Any, whole: Any, events: Any, uuid: str, name: str) -> None:
        self.part, self.whole, self.events = part, whole, events
        self.uuid, self.name = uuid, name
        self.xids: dict[int, int] = {}
