"""Chooses the backend by the kind of target, and finds the target's code. No other module knows all backends."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.app.devices import CPU, NO_DEVICES, Devices, allot, allot_to_models, find_gpus
from headway.config import CHARS, Settings, terms_of
from headway.config.extras import needing
from headway.config.target import FileTarget, ModuleTarget, ObservedTarget, RemoteTarget, Target
from headway.core.breaker import Breaker
from headway.core.ratelimit import CallPace
from headway.core.weight_estimate import WeightEstimate
from headway.errors import SettingError
from headway.model import ModelReport
from headway.ports import Backend
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import TlsCounts, WorkerCounts
from headway.runtime.logger import get_logger, import_grpc_quietly
from headway.runtime.shared_files import python_files, stamp

if TYPE_CHECKING:
    from headway.backends.process.group_guard import GroupGuard
    from headway.backends.remote.backend import RemoteBackend
    from headway.backends.remote.credentials import Credentials
    from headway.dialects.dialect import Remote

log = get_logger(__name__)

BREAKER_THRESHOLD = 5  # Consecutive failed batches after which a backend rests.
BREAKER_COOLDOWN = 0.5  # Length in seconds of a backend's first rest.


def source_folder(target: Target) -> Path | None:
    """Return the folder that contains the user's target file or package, or None for an installed package or a remote API."""
    match target:
        case FileTarget():
            return target.path.parent
        case ModuleTarget():
            package = Path(target.folder, target.module.partition(".")[0])
            if package.is_dir():
                return package
            return package.parent if package.with_suffix(".py").is_file() else None
        case _:
            return None


def target_digest(target: Target, *, stamps: bool = False) -> str:
    """Return the first 12 hexadecimal digits of a SHA-256 of the target's name and the Python files in and below its folder. If
    `stamps`, the digest also covers their modification times. Reading all files may take a while."""
    match target:
        case FileTarget():
            parts: list[str | bytes] = [target.path.name, target.attribute, target.arguments]
        case ModuleTarget():
            parts = [f"{target.module}:{target.attribute}", target.arguments]
        case RemoteTarget():
            parts = [target.url]
        case _:  # The code of an observed target isn't known here.
            return ""
    folder = source_folder(target)
    if folder is not None:
        parts += _content(folder, python_files(folder), stamps)
    elif isinstance(target, ModuleTarget):
        folder, files = _installed(target.module.partition(".")[0])
        parts += _content(folder, files, stamps)
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
    return hashed.hexdigest()[:12]


def _content(folder: Path, files: Sequence[Path], stamps: bool) -> list[str | bytes]:
    parts: list[str | bytes] = []
    for file in sorted(files):
        with contextlib.suppress(OSError):
            parts += str(file.relative_to(folder)), file.read_bytes()
            parts += [str(stamp(file))] if stamps else []
    return parts


def _installed(package: str) -> tuple[Path, Sequence[Path]]:
    for entry in sys.path:
        path = Path(entry, package)
        if path.is_dir():
            return path, python_files(path)
        if (file := path.with_suffix(".py")).is_file():
            return file.parent, [file]
    return Path(), []


class SlotPlan(msgspec.Struct, frozen=True):
    """Plan for one slot, from which `make_backend` builds its backend. If `warms_up`, the slot measures batches when it
    starts. If `cuts`, it may split a batch into several calls to save time. `pace` limits the calls of all slots of a
    remote API together. `shared` is what `BackendKind.check` built for all slots; if it is None, the slot builds its
    own."""

    settings: Settings
    name: str
    device: str = CPU
    breaker: Breaker | None = None
    guard: GroupGuard | None = None
    warms_up: bool = True
    cuts: bool = True
    weights: WeightEstimate | None = None
    certificates: RemoteCertificates | None = None
    counters: WorkerCounts | None = None
    pace: CallPace | None = None
    shared: Any = None

    @property
    def start_timeout(self) -> float:
        return self.settings.start_timeout_ms / 1000

    def count_large(self, direction: str, by_arena: bool) -> None:
        if self.counters is not None:
            self.counters.large_payloads[direction, "arena" if by_arena else "frame"] += 1


class BackendKind(msgspec.Struct, frozen=True):
    """Backend for one kind of target. `slot` is the prefix of worker names. It is empty if each slot has a device on this
    machine: workers are then named after the device, `gpu` or `cpu`. `words` are the banner's words for one slot and for
    several. If `one_breaker`, all slots share a breaker, because they call the same service. `check` builds the object that
    all slots share, and raises SettingError if no backend works with these settings."""

    make: Callable[[Any, SlotPlan], Backend]
    slot: str
    words: tuple[str, str]
    one_breaker: bool = False
    check: Callable[[Any, Settings], object] = lambda target, settings: None


def _process(target: ModuleTarget | FileTarget, plan: SlotPlan) -> Backend:
    from headway.backends.process.backend import ProcessBackend

    settings = plan.settings
    return ProcessBackend(
        target,
        worker=plan.name,
        device=plan.device,
        start_timeout=plan.start_timeout,
        # With a weight limit, the run time of many warm-up inputs says nothing about a full batch.
        max_batch=settings.max_batch_size if plan.warms_up and not settings.max_batch_weight else 0,
        max_rows=settings.max_batch_size,
        recycle_rss_bytes=settings.recycle_rss_mb << 20,
        log=log,
        guard=plan.guard,
        weights=plan.weights,
        arena_bytes=settings.arena_bytes,
        count=plan.count_large,
        cuts=plan.cuts,
        tiers=len(settings.tier_names),
    )


def _remote(target: RemoteTarget, plan: SlotPlan) -> Backend:
    remote, credentials = plan.shared or _reached(target, plan.settings)
    return _remote_backend(target)(
        target,
        remote=remote,
        credentials=credentials,
        certificates=plan.certificates,
        start_timeout=plan.start_timeout,
        max_rows=plan.settings.max_batch_size,
        breaker=plan.breaker,
        pace=plan.pace,
    )


def _remote_backend(target: RemoteTarget) -> type[RemoteBackend]:
    if target.over_grpc:
        reason = (
            "is reached over gRPC, which needs the packages grpcio and protobuf (extra `grpc`), which are not installed"
        )
        with needing("grpc", "target", str(target), reason):
            import_grpc_quietly()
            from headway.backends.grpc import GrpcBackend
        return GrpcBackend
    from headway.backends.http import HttpBackend  # This import takes a third of the startup time.

    return HttpBackend


def _reached(target: RemoteTarget, settings: Settings) -> tuple[Remote, Credentials]:
    from headway.backends.remote.credentials import Credentials
    from headway.dialects.table import reach

    if target.over_grpc:
        _remote_backend(target)
    remote = reach(target.url, settings.remote_format, settings.remote_model)
    return remote, Credentials(settings.remote_token, settings.remote_headers_file)


def make_remote_certificates(
    settings: Settings, targets: Iterable[Target | None], counts: TlsCounts
) -> RemoteCertificates | None:
    """Read the certificates for the remote APIs among these targets. Return None if there are no such targets or certificates.
    Raises SettingError if a file can't be used, or an API isn't called over TLS."""
    apis = [target for target in targets if isinstance(target, RemoteTarget)]
    if not apis or not (settings.remote_ca or settings.remote_cert or settings.remote_key):
        return None
    for api in apis:
        if not api.secure:
            name = "remote_ca" if settings.remote_ca else "remote_cert"
            reason, hint = (
                f"has no effect for {api}, which is not called over TLS",
                "Begin its URL with https:// or grpcs://.",
            )
            raise SettingError(name, getattr(settings, name), reason, f"{hint} Or leave this out.")
    return RemoteCertificates(settings.remote_ca, settings.remote_cert, settings.remote_key, counts)


def _observed(target: ObservedTarget, plan: SlotPlan) -> Backend:
    from headway.backends.process.observed import ObservedBackend  # Only needed in tests.

    return ObservedBackend(target, plan.name, plan.device, plan.start_timeout, log, plan.guard, plan.weights)


_LOCAL = BackendKind(_process, "", ("worker process", "worker processes"))

BACKENDS: Mapping[type[Target], BackendKind] = {
    ModuleTarget: _LOCAL,
    FileTarget: _LOCAL,
    ObservedTarget: BackendKind(_observed, _LOCAL.slot, _LOCAL.words),
    RemoteTarget: BackendKind(_remote, "remote", ("call in flight", "calls in flight"), True, _reached),
}


def worker_name(settings: Settings, target: Target, devices: Devices, index: int) -> str:
    """Return the name of a slot's worker. Names are unique in the fleet."""
    prefix = f"{settings.name}/" if settings.broker else ""
    kind = BACKENDS[type(target)].slot or ("cpu" if devices.of(index) == CPU else "gpu")
    return f"{prefix}{kind}-{index}"


def make_devices(settings: Settings, target: Target) -> Devices:
    """Assign each slot of a target its device. Slots of a remote API have none. Raises SettingError if there are too few GPUs."""
    if not is_local(target):
        return NO_DEVICES
    gpus = find_gpus()
    if gpus.warning and not settings.devices:
        log.warning(gpus.warning)
    return allot(settings, gpus)


def is_local(target: Target) -> bool:
    """Return True if each slot of a target has a device on this machine."""
    return not BACKENDS[type(target)].slot


def make_devices_of_models(plans: Mapping[str, tuple[Settings, Target]]) -> dict[str, Devices]:
    """Assign devices to the slots of several models. Raises SettingError if there are too few GPUs."""
    local = {model: settings for model, (settings, target) in plans.items() if is_local(target)}
    if len(plans) == 1:
        return {model: make_devices(settings, target) for model, (settings, target) in plans.items()}
    gpus = find_gpus()
    if gpus.warning and not all(settings.devices for settings in local.values()):
        log.warning(gpus.warning)
    first = next(iter(local.values()), None)
    if first is not None and first.models_per_gpu:
        return dict.fromkeys(plans, NO_DEVICES) | dict.fromkeys(local, allot(first, gpus))
    return dict.fromkeys(plans, NO_DEVICES) | allot_to_models(local, gpus)


def model_worker_name(model: str, settings: Settings, target: Target, devices: Devices, index: int) -> str:
    """Return the name of a slot's worker in a process that runs several models or versions. `model` is the key of its plan."""
    prefix = f"{settings.name}/" if settings.broker else ""
    return f"{prefix}{model}/{worker_name(settings, target, devices, index).removeprefix(prefix)}"


def make_weights(settings: Settings, target: Target, most: int) -> WeightEstimate | None:
    """Return the estimate for the target's weight function, or None if an input's weight is its number of characters. `most`
    limits a batch's weight (0: no limit). Raises SettingError if the target is a remote API, which has no functions."""
    if settings.weight == CHARS:
        return None
    if not is_local(target):
        reason = "names a function, but a remote API has no functions to call"
        raise SettingError("weight", settings.weight, reason, "Use chars.")
    return WeightEstimate(settings.weight, most, settings.max_batch_size)


def make_backend(target: Target, plan: SlotPlan) -> Backend:
    """Build the backend of a target."""
    return BACKENDS[type(target)].make(target, plan)


def make_report(settings: Settings, target: Target) -> ModelReport:
    """Build the report that workers send about their model."""
    return ModelReport(settings.model_version, target_digest(target, stamps=settings.reload), terms_of(settings))
