"""Checks of settings. Every refusal names the setting, its value, why, and how to mend it.

A setting is named as its user wrote it: `--max-batch-size`, `HEADWAY_MAX_BATCH_SIZE` or `headway.toml: max_batch_size`.
The checks therefore write field names between backticks, and `sources.load`, which knows where each value came from,
puts the spelling in.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from headway.config import broker, database
from headway.core import policies, versions, weight_estimate
from headway.core.deadlines import MOST_MS
from headway.core.likeness import nearest
from headway.core.scaling import rules as scale_rules
from headway.errors import SettingError

if TYPE_CHECKING:
    from headway.config.fields import Setting
    from headway.config.settings import Settings

ALL_ROWS = "all"
LEDGER_ROWS = ("ended", ALL_ROWS)
"""Values of `ledger_rows`: rows of requests that have ended, or of all that were taken in."""
LOG_LEVELS = ("debug", "info", "warning", "error")
NONE, LOCAL = "none", "local"
AUTOSCALE = (NONE, LOCAL)
"""Ways in which the number of workers is set: not at all, or in these processes."""
SCALE_POLICIES = ("rules", "plan")
"""Policies by which the number of workers is chosen."""

MAX_REQUEST_TIMEOUT_MS = float(MOST_MS)
"""Longest deadline of a request, of its wait and of its batch, in ms."""
MAX_BATCH = 4096
"""Most inputs of one batch."""
MOST_WORKERS = 256
MOST_WORKERS_OF_FLEET = 10_000
MOST_WEIGHT = weight_estimate.MOST_WEIGHT


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse(settings: Settings, name: str, reason: str, hint: str) -> NoReturn:
    """Raise the SettingError of a field's value."""
    field: Setting = settings.__dataclass_fields__[name].metadata["setting"]
    raise SettingError(name, field.shown(getattr(settings, name)), reason, hint)


def _tiers(settings: Settings) -> None:
    names = settings.tier_names
    fit = all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in names)
    if not fit or len(set(names)) != len(names) or len(names) > 8:
        reason = "must be 1 to 8 different names of letters, digits or -_."
        refuse(settings, "tiers", reason, "For example enterprise,paid,free.")
    if settings.default_tier not in names:
        near = nearest(settings.default_tier, names)
        reason = f"is not one of the tiers {settings.tiers} of `tiers`"
        refuse(settings, "default_tier", reason, f"Use {' or '.join(near or names)}.")


_DEVICE = re.compile(r"cpu|[0-9]{1,4}|(GPU-|MIG-(GPU-)?)[0-9A-Fa-f]+(-[0-9A-Fa-f]+)*(/[0-9]+/[0-9]+)?")
"""Id of a GPU as CUDA_VISIBLE_DEVICES takes it, or `cpu`."""


def _devices(settings: Settings) -> None:
    ids = settings.device_ids
    if not ids:
        return
    if not all(ids):
        refuse(settings, "devices", "has an empty id in it", "Name one id per worker, for example 0,1.")
    for id in ids:
        if not _DEVICE.fullmatch(id):
            hint = "Write a number or a UUID, as nvidia-smi -L lists them, such as 0, GPU-8932f937-… or MIG-…; or cpu."
            refuse(settings, "devices", f"{id!r} is no id of a GPU", hint)
    fewer = settings.autoscale == LOCAL and settings.workers < len(ids)
    if len(ids) != settings.workers and not fewer:
        count = "1 device" if len(ids) == 1 else f"{len(ids)} devices"
        reason = f"names {count} for {settings.workers} workers (`workers`)"
        refuse(settings, "devices", reason, "Name one id per worker, or leave it out.")


def _versions(settings: Settings) -> None:
    for one in settings.models:
        for name, on in (("models_per_gpu", settings.models_per_gpu), ("autoscale", settings.autoscale == LOCAL)):
            if one.versions and on:
                reason = f"goes by models, and model {one.name} has workers of {one.name}@{one.versions[0].name} here"
                hint = (
                    "Leave it out; or run each version in a process of its own over one broker, with `model_version`."
                )
                refuse(settings, name, reason, hint)


def _min_warm(settings: Settings) -> None:
    room = settings.models_per_gpu * settings.workers
    if not room:
        return
    if settings.min_warm > settings.workers:
        reason = f"is more than there are GPUs ({settings.workers} by `workers`)"
        refuse(settings, "min_warm", reason, "A GPU holds a model once; lower it, or raise `workers`.")
    kept = [int(dict(one.values).get("min_warm", settings.min_warm)) for one in settings.models]
    for one, least in zip(settings.models, kept, strict=True):
        if least > settings.workers:
            reason = f"is more than there are GPUs ({settings.workers} by `workers`)"
            hint = "A GPU holds a model once; lower it, or raise `workers`."
            raise SettingError(f"models.{one.name}.min_warm", least, reason, hint)
    if sum(kept) > room or (sum(kept) == room and 0 in kept):
        reason = (
            f"is too few: {settings.workers} GPUs hold {room} models, and `min_warm` keeps {sum(kept)} of them loaded"
        )
        refuse(settings, "models_per_gpu", reason, "Raise it or `workers`, or lower `min_warm`.")
    for one in settings.models:
        own = [
            name for name, value in one.values if name in ("workers", "devices") and value != getattr(settings, name)
        ]
        if own:
            reason = f"shares all GPUs among the models, but model {one.name} has {own[0]} of its own"
            refuse(settings, "models_per_gpu", reason, f"Leave {own[0]} out of its table, or this.")


def _times(settings: Settings) -> None:
    """Refuse a time that does not go together with another one."""
    if settings.queue_timeout_ms > settings.request_timeout_ms:
        reason = f"is longer than `request_timeout_ms` ({settings.request_timeout_ms:g} ms)"
        refuse(settings, "queue_timeout_ms", reason, "Lower it, or raise `request_timeout_ms`.")
    if settings.max_wait_ms is not None and settings.max_wait_ms > settings.queue_timeout_ms:
        reason = f"is longer than `queue_timeout_ms` ({settings.queue_timeout_ms:g} ms)"
        refuse(settings, "max_wait_ms", reason, "Every request would expire before its batch leaves; lower it.")


def _policy(settings: Settings) -> None:
    if policies.POLICIES[settings.policy].own_waits and settings.max_wait_ms is not None:
        reason = f"has no effect with `policy` {settings.policy}, which has waits of its own"
        refuse(settings, "max_wait_ms", reason, "Leave it out, or choose another policy.")


def _admin(settings: Settings) -> None:
    if not settings.admin_token and not is_loopback(settings.admin_host):
        hint = "Set HEADWAY_ADMIN_TOKEN, or bind the admin port to 127.0.0.1."
        refuse(settings, "admin_host", "is not loopback and `admin_token` is not set", hint)
    tokens = settings.admin_token.split(",") if settings.admin_token else []
    if not all(tokens) or len(tokens) > 2:
        reason = "must be one token, or two with a comma between them"
        refuse(settings, "admin_token", reason, "Write NEW,OLD while you change it.")
    if any(token.startswith("hw_live_") for token in tokens):
        hint = "Make a service token: headway keys create --service."
        refuse(settings, "admin_token", "is a client's key", hint)
    if settings.port and settings.port == settings.admin_port and settings.host == settings.admin_host:
        refuse(settings, "admin_port", "is the public port too (`port`)", "Give each its own.")


def _grpc_port(settings: Settings) -> None:
    if settings.grpc_port and settings.grpc_port == settings.port:
        refuse(settings, "grpc_port", "is the HTTP port too (`port`)", "Give each its own, for example 8081.")
    if settings.grpc_port and settings.grpc_port == settings.admin_port and settings.host == settings.admin_host:
        refuse(settings, "grpc_port", "is the admin port too (`admin_port`)", "Give each its own, for example 8081.")


def _files(settings: Settings) -> None:
    if settings.keys == "ledger" and not settings.ledger:
        reason = "is the ledger's database, and `ledger` is not set"
        refuse(settings, "keys", reason, "Set `ledger`, or name a TOML file of keys.")
    if settings.input_policy and not is_file(Path(settings.input_policy)):
        refuse(settings, "input_policy", "no such file", "Name a TOML file of rules, or leave it out.")
    if settings.chat_template != "plain" and not is_file(Path(settings.chat_template)):
        refuse(settings, "chat_template", "no such file", "Name a file with a Jinja template, or plain.")
    if settings.jwt and not is_file(Path(settings.jwt)):
        refuse(settings, "jwt", "no such file", "Name a TOML file of issuers, or leave it out.")


def _tls(settings: Settings) -> None:
    for name in ("tls_key", "tls_client_ca"):
        if getattr(settings, name) and not settings.tls_cert:
            hint = "Name the certificate of the ports as well, or leave it out."
            refuse(settings, name, "has no effect without `tls_cert`", hint)


def _remote_key(settings: Settings) -> None:
    if settings.remote_key and not settings.remote_cert:
        hint = "Name the certificate to show as well, or leave it out."
        refuse(settings, "remote_key", "has no effect without `remote_cert`", hint)


def _remote_headers(settings: Settings) -> None:
    if settings.remote_headers_file and not is_file(Path(settings.remote_headers_file)):
        refuse(settings, "remote_headers_file", "no such file", "Name a file of header fields, or leave it out.")


def _ledger(settings: Settings) -> None:
    wrong = database.fault(settings.ledger) if settings.ledger else None
    if wrong is not None:
        refuse(settings, "ledger", *wrong)


def _bulk(settings: Settings) -> None:
    if settings.bulk_dir and (settings.broker or "://" in settings.bulk_dir) and not settings.ledger:
        reason = "needs a database of jobs, which is in no bucket, and which all gateways share; `ledger` is not set"
        refuse(settings, "bulk_dir", reason, "Set `ledger`, for example postgresql://USER:PASSWORD@HOST:5432/DATABASE.")


def _shed_depths(settings: Settings) -> None:
    found = re.fullmatch(r"auto|([0-9]{1,8}),([0-9]{1,8})", settings.shed_depths)
    if found is None:
        refuse(settings, "shed_depths", "is neither auto nor two numbers", "For example 100,500.")
    if found[1] and not 1 <= int(found[1]) <= int(found[2]):
        refuse(settings, "shed_depths", "must be two numbers from 1 on that do not fall", "For example 100,500.")


def _room(settings: Settings) -> None:
    """Check that the queue, and the quarter as large for bodies, have room for the largest body.

    A tenant gets half of the queue's room, and some characters count four bytes; of bodies on their way there is room for two.
    """
    least = -(-8 * settings.max_body_bytes >> 20) + 1
    if settings.memory_mb < least:
        reason = f"has no room for a request of `max_body_bytes` ({settings.max_body_bytes} bytes)"
        refuse(settings, "memory_mb", reason, f"Use {least} or more, or lower `max_body_bytes`.")


def _tier_rates(settings: Settings) -> None:
    seen: set[str] = set()
    for part in filter(None, settings.tier_rates.split(",")):
        name, sign, rate = part.strip().partition("=")
        if not sign or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,3})?", rate) or float(rate) <= 0:
            reason = f"{part.strip()!r} is not TIER=REQUESTS a minute, above 0"
            refuse(settings, "tier_rates", reason, "For example free=60000,paid=600000.")
        if name not in settings.tier_names:
            reason = f"{name!r} is not one of the tiers {settings.tiers} of `tiers`"
            refuse(settings, "tier_rates", reason, f"Use {' or '.join(settings.tier_names)}.")
        if name in seen:
            refuse(settings, "tier_rates", f"names the tier {name!r} twice", "Give each tier one rate.")
        seen.add(name)


def _version_weights(settings: Settings) -> None:
    try:
        versions.read_weights(settings.version_weights)
    except versions.NoWeights as exc:
        refuse(settings, "version_weights", f"cannot be read: {exc}", "For example 3=95,4=5.")


def _broker(settings: Settings) -> None:
    wrong = broker.fault(settings.broker) if settings.broker else None
    if wrong is not None:
        refuse(settings, "broker", *wrong)


def _scale_rules(settings: Settings) -> None:
    try:
        scale_rules.read(settings.scale_rules)
    except scale_rules.NoRules as exc:
        hint = 'For example [{"queue_above": 500, "for_s": 30, "add": 3}].'
        refuse(settings, "scale_rules", f"cannot be read: {exc}", hint)


def _scaling(settings: Settings) -> None:
    if settings.max_workers and settings.min_workers > settings.max_workers:
        reason = f"is more than `max_workers` ({settings.max_workers})"
        refuse(settings, "min_workers", reason, "Lower it, or raise `max_workers`.")
    if settings.min_workers and settings.scale_to_zero_after_s:
        reason = f"needs `min_workers` 0, and that is {settings.min_workers}"
        refuse(settings, "scale_to_zero_after_s", reason, "Set `min_workers` to 0, or leave this out.")
    if settings.scale_to_zero_after_s and settings.models_per_gpu:
        reason = "gives GPUs back, and with `models_per_gpu` the models share them: those that nobody asks for make room anyway"
        refuse(settings, "scale_to_zero_after_s", reason, "Leave one of them out.")
    if settings.autoscale == LOCAL and settings.models_per_gpu:
        reason = "gives each model workers of its own, and with `models_per_gpu` the models share them"
        refuse(settings, "autoscale", reason, "Leave one of them out.")


def is_file(path: Path) -> bool:
    """Whether there is such a file, as far as this process can see."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, holds a NUL, or may not be looked at
        return False


CHECKS: tuple[Callable[[Settings], None], ...] = (
    _remote_headers,
    _remote_key,
    _tiers,
    _devices,
    _versions,
    _min_warm,
    _times,
    _policy,
    _admin,
    _grpc_port,
    _files,
    _tls,
    _ledger,
    _bulk,
    _shed_depths,
    _room,
    _tier_rates,
    _version_weights,
    _scale_rules,
    _scaling,
    _broker,
)
