"""Choice of the backend by the kind of target. No other module knows all backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headway.app.devices import CPU, NO_DEVICES, Devices, allot, allot_to_models, find_gpus
from headway.app.target_code import target_digest
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
from headway.runtime.logger import get_logger

if TYPE_CHECKING:
    from headway.backends.process.group_guard import GroupGuard
    from headway.backends.remote.backend import RemoteBackend
    from headway.backends.remote.credentials import Credentials
    from headway.dialects.dialect import Remote

log = get_logger(__name__)

BREAKER_THRESHOLD = 5
"""Failed batches in a row after which a backend rests."""
BREAKER_COOLDOWN = 0.5
"""Seconds of its first rest."""


class SlotPlan(msgspec.Struct, frozen=True):
    """Plan of one slot, from which its backend is built.

    With `warms_up` the slot measures batches at its start. With `cuts` it may run a batch in several calls where that saves
    time. `pace` bounds the calls of all slots of a remote API together. `shared` is what the kind's `check` built for all
    slots. If it is None, the slot builds its own.
    """

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
        """Seconds within which the slot must be ready."""
        return self.settings.start_timeout_ms / 1000

    def count_large(self, direction: str, by_arena: bool) -> None:
        """Count a large value sent (`in`) or received (`out`), by the arena or in a frame."""
        if self.counters is not None:
            self.counters.large_payloads[direction, "arena" if by_arena else "frame"] += 1


class BackendKind(msgspec.Struct, frozen=True):
    """Way to run targets of one kind.

    `slot` is the prefix of worker names. It is empty if each slot has a device of this machine. Then the prefix is `gpu` or `cpu`.
    The banner calls one slot and several by `words`. With `one_breaker` all slots share a breaker, because they call the same
    service. `check` builds what all slots share. It raises SettingError if no backend can be built with these settings.
    """

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
        # A batch of many warm-up inputs says nothing about one that is full by weight.
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
    """Return the class of a remote API's backends. Raises SettingError if a package is missing."""
    if target.over_grpc:
        reason = "is reached over gRPC, which needs the packages grpcio and protobuf, the extra `grpc`, which are not installed"
        with needing("grpc", "target", str(target), reason):
            from headway.backends.grpc.backend import GrpcBackend
        return GrpcBackend
    from headway.backends.http.backend import HttpBackend  # It would take a third of the start of every process.

    return HttpBackend


def _reached(target: RemoteTarget, settings: Settings) -> tuple[Remote, Credentials]:
    """Return the API with its dialect, and the credentials for it."""
    from headway.backends.remote.credentials import Credentials
    from headway.dialects.table import reach

    if target.over_grpc:
        _remote_backend(target)
    remote = reach(target.url, settings.remote_format, settings.remote_model)
    return remote, Credentials(settings.remote_token, settings.remote_headers_file)


def make_remote_certificates(
    settings: Settings, targets: Iterable[Target | None], counts: TlsCounts
) -> RemoteCertificates | None:
    """Read the certificates for the remote APIs among these targets, or None without such targets or certificates. Raises
    SettingError if a file can't be used, or an API isn't called over TLS."""
    apis = [target for target in targets if isinstance(target, RemoteTarget)]
    if not apis or not (settings.remote_ca or settings.remote_cert or settings.remote_key):
        return None
    for api in apis:
        if not api.secure:
            name = "remote_ca" if settings.remote_ca else "remote_cert"
            reason = f"has no effect towards {api}, which is asked without TLS"
            raise SettingError(
                name, getattr(settings, name), reason, "Write https:// or grpcs:// in its URL, or leave this out."
            )
    return RemoteCertificates(settings.remote_ca, settings.remote_cert, settings.remote_key, counts)


def _observed(target: ObservedTarget, plan: SlotPlan) -> Backend:
    from headway.backends.process.observed import ObservedBackend  # Only tests use it.

    return ObservedBackend(target, plan.name, plan.device, plan.start_timeout, log, plan.guard, plan.weights)


_LOCAL = BackendKind(_process, "", ("worker process", "worker processes"))

BACKENDS: Mapping[type[Target], BackendKind] = {
    ModuleTarget: _LOCAL,
    FileTarget: _LOCAL,
    ObservedTarget: BackendKind(_observed, _LOCAL.slot, _LOCAL.words),
    RemoteTarget: BackendKind(_remote, "remote", ("call in flight", "calls in flight"), True, _reached),
}


def worker_name(settings: Settings, target: Target, devices: Devices, index: int) -> str:
    """Return the name of a slot's worker, which is unique in the fleet."""
    prefix = f"{settings.name}/" if settings.broker else ""
    kind = BACKENDS[type(target)].slot or ("cpu" if devices.of(index) == CPU else "gpu")
    return f"{prefix}{kind}-{index}"


def make_devices(settings: Settings, target: Target) -> Devices:
    """Assign each slot of a target its device, unless it calls a remote API. Raises SettingError if there are too few GPUs."""
    if not is_local(target):
        return NO_DEVICES
    gpus = find_gpus()
    if gpus.warning and not settings.devices:
        log.warning(gpus.warning)
    return allot(settings, gpus)


def is_local(target: Target) -> bool:
    """Return True if each slot of a target has a device of this machine."""
    return not BACKENDS[type(target)].slot


def make_devices_of_models(plans: Mapping[str, tuple[Settings, Target]]) -> dict[str, Devices]:
    """Assign devices to the slots of several models, given the settings and target of each. Raises SettingError."""
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
    """Return the name of a slot's worker in a process of several models or versions. `model` is the key of its plan."""
    prefix = f"{settings.name}/" if settings.broker else ""
    return f"{prefix}{model}/{worker_name(settings, target, devices, index).removeprefix(prefix)}"


def make_weights(settings: Settings, target: Target, most: int) -> WeightEstimate | None:
    """Build the estimate for a weight function, or None if weights are characters. `most` limits a batch's weight unless it is
    0. Raises SettingError if the target is a remote API, which has no functions."""
    if settings.weight == CHARS:
        return None
    if not is_local(target):
        reason = "names a function, and a remote API has none that could be called"
        raise SettingError("weight", settings.weight, reason, "Use chars.")
    return WeightEstimate(settings.weight, most, settings.max_batch_size)


def make_backend(target: Target, plan: SlotPlan) -> Backend:
    """Build the backend of a target."""
    return BACKENDS[type(target)].make(target, plan)


def make_report(settings: Settings, target: Target) -> ModelReport:
    """Build what workers report about their model."""
    return ModelReport(settings.model_version, target_digest(target, stamps=settings.reload), terms_of(settings))
