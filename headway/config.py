"""All settings, in one frozen object, checked when it is built.

Each field carries its help text, its unit and the group it is shown under; flags, environment variables
(`HEADWAY_` and the name in capitals) and the keys of `headway.toml` are all derived from the same table.
A flag beats the environment, which beats the file, which beats the default.

Every message names a setting as its user wrote it: `--max-batch-size`, `HEADWAY_MAX_BATCH_SIZE` or
`headway.toml: max_batch_size`. The checks therefore write field names between backticks, and `load`, which
knows where each value came from, puts the spelling in.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import re
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import SettingError

POLICIES = ("paced", "window", "table", "pid")
LOG_LEVELS = ("debug", "info", "warning", "error")
REMOTE_FORMATS = ("list", "inputs")

MAX_REQUEST_TIMEOUT_MS = 30_000.0
MAX_BATCH = 100

PREFIX = "HEADWAY_"
"""What the name of an environment variable starts with."""

_SERVICE = "Service"
_WORKERS = "Workers"
_BATCHING = "Batching"
_FLEET = "Several processes"
_TIMEOUTS = "Deadlines"
_TIERS = "Tiers and keys"
_DOOR = "Limits at the door"
_REMOTE = "Remote API"
_ADMIN_LOG = "Administration and log"


def _setting(default: Any, group: str, help_text: str, unit: str = "", secret: bool = False) -> Any:
    metadata = {"help": help_text, "unit": unit, "group": group, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one `headway serve` does. Built by `load`, or directly in tests; a wrong value raises SettingError."""

    host: str = _setting("127.0.0.1", _SERVICE, "Address of the public port; 0.0.0.0 for every interface.")
    port: int = _setting(8000, _SERVICE, "Public port; 0 lets the system choose.")
    model: str = _setting("default", _SERVICE, "Name under which the target is served.")
    model_version: str = _setting("1", _SERVICE, "Version reported in answers.")
    drain_timeout_ms: float = _setting(
        30_000.0, _SERVICE, "Longest wait for requests in flight when shutting down.", "ms"
    )
    reload: bool = _setting(False, _SERVICE, "For development: replace the workers when the target's file changes.")

    workers: int = _setting(1, _WORKERS, "Worker processes, one per GPU; for a remote API: calls in flight at once.")
    devices: str = _setting(
        "",
        _WORKERS,
        "Comma-separated GPU ids, one per worker, for CUDA_VISIBLE_DEVICES; cpu: none; left out: counts up from 0.",
    )
    start_timeout_ms: float = _setting(
        300_000.0, _WORKERS, "Longest time for a worker to load the target and pass its warm-up batch.", "ms"
    )
    recycle_rss_mb: int = _setting(
        0, _WORKERS, "Replace a worker whose resident memory (not the GPU's) exceeds this; 0: never.", "MiB"
    )
    recycle_after_s: float = _setting(0.0, _WORKERS, "Replace a worker after this age; 0: never.", "s")

    max_batch_size: int = _setting(32, _BATCHING, "Largest batch the target takes.", "inputs")
    max_wait_ms: float | None = _setting(
        None,
        _BATCHING,
        "Longest wait for batch-mates, for pid the wait it aims at; unset: 40 for window and pid, none for paced.",
        "ms",
    )
    policy: str = _setting("paced", _BATCHING, "When a batch leaves: paced, window, table or pid.")
    max_queue: int = _setting(20_000, _BATCHING, "Most entries waiting at once, over all tiers.", "inputs")

    broker: str = _setting(
        "",
        _FLEET,
        "URL of the Redis or Valkey that gateways and workers share: redis://HOST:PORT/DB, rediss:// for TLS, "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT; left out: the queue is in this process.",
        secret=True,
    )
    broker_prefix: str = _setting("headway", _FLEET, "What the broker's keys begin with; one for each installation.")
    broker_timeout_ms: float = _setting(
        1000.0, _FLEET, "Longest time for one call to the broker before it counts as failed.", "ms"
    )
    lease_ms: float = _setting(
        3000.0, _FLEET, "How long a worker may be silent before what it runs is given to another.", "ms"
    )
    shards: int = _setting(1, _FLEET, "Queues that each model is split into; 16 is usual when one Redis is too few.")
    name: str = _setting("", _FLEET, "Name of this process in the fleet; left out: host name and process id.")
    fallback: str = _setting(
        "", _FLEET, "Target that a gateway asks itself while the broker is gone; left out: requests then get 503."
    )
    fallback_concurrency: int = _setting(1, _FLEET, "Batches that a gateway runs at once on `fallback`.", "batches")
    target_utilisation: float = _setting(
        0.7, _FLEET, "Share of the measured capacity, 0.1 to 1, that the fleet is meant to carry."
    )

    queue_timeout_ms: float = _setting(
        2000.0,
        _TIMEOUTS,
        "Longest wait in the queue before the first run; left out, never beyond the time in all.",
        "ms",
    )
    gpu_timeout_ms: float = _setting(3000.0, _TIMEOUTS, "Longest run of one batch; then its worker is killed.", "ms")
    request_timeout_ms: float = _setting(4000.0, _TIMEOUTS, "Longest time for a request in all, at most 30000.", "ms")

    tiers: str = _setting("enterprise,paid,free", _TIERS, "Tiers, highest first, comma-separated.")
    default_tier: str = _setting("paid", _TIERS, "Tier of every request, when there is no file of keys.")
    reserved_share: float = _setting(0.1, _TIERS, "Share of each batch, 0 to 0.5, kept for lower tiers when they wait.")
    keys: str = _setting(
        "", _TIERS, "TOML file of API keys (SHA-256, user, tenant, tier); without it no key is asked for."
    )

    max_body_bytes: int = _setting(1_048_576, _DOOR, "Largest request body.", "bytes")
    max_header_bytes: int = _setting(16_384, _DOOR, "Largest request line and header together.", "bytes")
    max_connections: int = _setting(10_000, _DOOR, "Most open client connections.")
    header_timeout_ms: float = _setting(10_000.0, _DOOR, "Longest time to receive a request's header.", "ms")
    body_timeout_ms: float = _setting(10_000.0, _DOOR, "Longest time to receive a request's body.", "ms")
    keep_alive_ms: float = _setting(30_000.0, _DOOR, "How long an idle connection stays open.", "ms")

    remote_format: str = _setting(
        "list", _REMOTE, 'Body the remote API takes: list (["a", "b"]) or inputs ({"inputs": ["a", "b"]}).'
    )
    remote_token: str = _setting(
        "", _REMOTE, "Bearer token sent to the remote API; better set in the environment.", secret=True
    )

    admin_host: str = _setting(
        "127.0.0.1", _ADMIN_LOG, "Address of the admin port; off loopback an admin token is required."
    )
    admin_port: int = _setting(
        9000, _ADMIN_LOG, "Admin port (metrics, health, workers, dead letters); 0 lets the system choose."
    )
    admin_token: str = _setting(
        "",
        _ADMIN_LOG,
        "Service token that admin routes ask for (Authorization: Bearer …); better set in the environment.",
        secret=True,
    )
    log_level: str = _setting("info", _ADMIN_LOG, "Least important line that is logged: debug, info, warning or error.")
    log_json: bool = _setting(False, _ADMIN_LOG, "Log lines as JSON.")

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Tiers, highest first."""
        return tuple(name.strip() for name in self.tiers.split(","))

    @property
    def default_tier_index(self) -> int:
        """Index of `default_tier` in `tier_names`."""
        return self.tier_names.index(self.default_tier)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """One GPU id per worker."""
        if self.devices:
            return tuple(part.strip() for part in self.devices.split(","))
        return tuple(str(number) for number in range(self.workers))


FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings)}
"""The fields of Settings by name, in the order in which they are shown; metadata: `help`, `unit`, `group`, `secret`."""

_KINDS: dict[str, type] = {
    name: next(t for t in (typing.get_args(hint) or (hint,)) if t is not type(None))
    for name, hint in typing.get_type_hints(Settings).items()
    if name in FIELDS
}


def kind(name: str) -> type:
    """The type of field `name`: str, int, float or bool."""
    return _KINDS[name]


def flag(name: str) -> str:
    """The command-line spelling of field `name`."""
    return f"--{name.replace('_', '-')}"


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse(settings: Settings, name: str, reason: str, mend: str) -> NoReturn:
    raise SettingError(name, _shown(name, getattr(settings, name)), reason, mend)


def _shown(name: str, value: object) -> object:
    return "…" if name in FIELDS and FIELDS[name].metadata["secret"] else value


def _between(name: str, low: float, high: float) -> Callable[[Settings], None]:
    def check(settings: Settings) -> None:
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            span = (
                f"{low:.15g} and {high:.15g} {FIELDS[name].metadata['unit'].partition(' to ')[0].strip('0123456789')}"
            )
            _refuse(settings, name, f"must lie between {span.strip()}", "Choose a value in that range.")

    return check


def _one_of(name: str, allowed: tuple[str, ...]) -> Callable[[Settings], None]:
    def check(settings: Settings) -> None:
        value = getattr(settings, name)
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, 1)
            _refuse(settings, name, "is not known", f"Use {' or '.join(near or allowed)}.")

    return check


def _made_of(name: str, pattern: str, reason: str, mend: str) -> Callable[[Settings], None]:
    form = re.compile(pattern)

    def check(settings: Settings) -> None:
        if not form.fullmatch(getattr(settings, name)):
            _refuse(settings, name, reason, mend)

    return check


def _tiers(settings: Settings) -> None:
    names = settings.tier_names
    fit = all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in names)
    if not fit or len(set(names)) != len(names) or len(names) > 8:
        reason = "must be 1 to 8 different names of letters, digits or -_."
        _refuse(settings, "tiers", reason, "For example enterprise,paid,free.")
    if settings.default_tier not in names:
        near = difflib.get_close_matches(settings.default_tier, names, 1)
        reason = f"is not one of the tiers {settings.tiers} of `tiers`"
        _refuse(settings, "default_tier", reason, f"Use {' or '.join(near or names)}.")


def _devices(settings: Settings) -> None:
    ids = settings.device_ids
    if not all(ids):
        _refuse(settings, "devices", "has an empty id in it", "Name one id per worker, for example 0,1.")
    if len(ids) != settings.workers:
        reason = f"names {len(ids)} GPUs for {settings.workers} workers (`workers`)"
        _refuse(settings, "devices", reason, "Name one id per worker, or leave it out.")


def _timeouts(settings: Settings) -> None:
    if settings.queue_timeout_ms > settings.request_timeout_ms:
        reason = f"is longer than `request_timeout_ms` ({settings.request_timeout_ms:g} ms)"
        _refuse(settings, "queue_timeout_ms", reason, "Lower it, or raise `request_timeout_ms`.")
    if settings.max_wait_ms is not None and settings.max_wait_ms > settings.queue_timeout_ms:
        reason = f"is longer than `queue_timeout_ms` ({settings.queue_timeout_ms:g} ms)"
        _refuse(settings, "max_wait_ms", reason, "Every request would expire before its batch leaves; lower it.")


def _policy(settings: Settings) -> None:
    if settings.policy == "table" and settings.max_wait_ms is not None:
        reason = "has no effect with `policy` table, which has waits of its own"
        _refuse(settings, "max_wait_ms", reason, "Leave it out, or choose another policy.")


def _admin(settings: Settings) -> None:
    if not settings.admin_token and not is_loopback(settings.admin_host):
        mend = "Set HEADWAY_ADMIN_TOKEN, or bind the admin port to 127.0.0.1."
        _refuse(settings, "admin_host", "is not loopback and `admin_token` is not set", mend)
    if settings.port and settings.port == settings.admin_port and settings.host == settings.admin_host:
        _refuse(settings, "admin_port", "is the public port too (`port`)", "Give each its own.")


def _files(settings: Settings) -> None:
    if settings.keys and not _is_file(Path(settings.keys)):
        _refuse(settings, "keys", "no such file", "Name a TOML file of keys, or leave it out.")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, holds a NUL, or may not be looked at
        return False


_NAME = (r"[A-Za-z0-9_.:/-]{1,128}", "must be 1 to 128 letters, digits or -_.:/", "For example minilm-v2.")
_ADDRESS = (r"[A-Za-z0-9_.:%-]{1,253}", "is no address or host name", "For example 127.0.0.1 or ::1.")
_TOKEN = (r"[!-~]{0,4096}", "must be printable ASCII without spaces", "Choose letters and digits.")

_CHECKS: tuple[Callable[[Settings], None], ...] = (
    _between("port", 0, 65_535),
    _between("admin_port", 0, 65_535),
    _between("workers", 1, 256),
    _between("broker_timeout_ms", 10, 60_000),
    _between("lease_ms", 1500, 600_000),
    _between("shards", 1, 256),
    _between("fallback_concurrency", 1, 256),
    _between("target_utilisation", 0.1, 1),
    _between("max_batch_size", 1, MAX_BATCH),
    _between("max_wait_ms", 0, MAX_REQUEST_TIMEOUT_MS),
    _between("queue_timeout_ms", 1, MAX_REQUEST_TIMEOUT_MS),
    _between("gpu_timeout_ms", 1, MAX_REQUEST_TIMEOUT_MS),
    _between("request_timeout_ms", 1, MAX_REQUEST_TIMEOUT_MS),
    _between("reserved_share", 0, 0.5),
    _between("max_queue", 1, 10_000_000),
    _between("max_body_bytes", 64, 1 << 30),
    _between("max_header_bytes", 256, 1 << 20),
    _between("max_connections", 1, 1_000_000),
    _between("header_timeout_ms", 10, 600_000),
    _between("body_timeout_ms", 10, 600_000),
    _between("keep_alive_ms", 10, 3_600_000),
    _between("drain_timeout_ms", 0, 3_600_000),
    _between("start_timeout_ms", 100, 3_600_000),
    _between("recycle_rss_mb", 0, 1 << 24),
    _between("recycle_after_s", 0, 31_536_000),
    _one_of("policy", POLICIES),
    _one_of("log_level", LOG_LEVELS),
    _one_of("remote_format", REMOTE_FORMATS),
    _made_of("model", *_NAME),
    _made_of("model_version", *_NAME),
    _made_of("broker_prefix", *_NAME),
    _made_of("name", "|" + _NAME[0], *_NAME[1:]),
    _made_of("host", *_ADDRESS),
    _made_of("admin_host", *_ADDRESS),
    _made_of("admin_token", *_TOKEN),
    _made_of("remote_token", *_TOKEN),
    _tiers,
    _devices,
    _timeouts,
    _policy,
    _admin,
    _files,
)


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> Settings:
    """Merge flags, environment and file into Settings.

    Arguments:
        flags: field name to value or to its text, None for a flag that was not given.
        environ: the process environment; `HEADWAY_PORT` sets `port`, and so on. An empty variable counts as
            not set. `HEADWAY_CONFIG` names the file when `file` is None.
        file: a TOML file; when none is named, `headway.toml` in the working directory is read if it is there.

    Raises:
        SettingError: a name is unknown, or a value is of the wrong type or out of range.
    """
    source = "--config"
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        file, source = Path(environ[f"{PREFIX}CONFIG"]), f"{PREFIX}CONFIG"
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {name: flag(name) for name in FIELDS}
    for given in (_from_file(file, source), _from_environ(environ), _from_flags(flags)):
        for name, (spelt, value) in given.items():
            values[name], spelling[name] = value, spelt
    # Who shortens the time in all should not have to shorten the time in the queue, too.
    default = FIELDS["queue_timeout_ms"].default
    if 1.0 <= values.get("request_timeout_ms", default) < default:
        values.setdefault("queue_timeout_ms", values["request_timeout_ms"])
    try:
        return Settings(**values)
    except SettingError as exc:
        spell = _speller(spelling)
        spelt = spelling[exc.setting] + ("" if exc.setting in values else " (its default)")
        raise SettingError(spelt, exc.value, spell(exc.reason), spell(exc.mend)) from None


def _speller(spelling: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces the field names between backticks by what their user wrote."""
    quoted = re.compile("`(" + "|".join(FIELDS) + ")`")
    return lambda text: quoted.sub(lambda match: spelling[match[1]], text)


_Given = dict[str, tuple[str, Any]]
"""Field name to its spelling in one source, and its value there."""


def _from_file(file: Path | None, source: str) -> _Given:
    path = file or Path("headway.toml")
    if not _is_file(path):
        if file is None:
            return {}
        raise SettingError(source, str(file), "no such file", "Name an existing TOML file, or leave it out.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingError(source, str(path), f"cannot be read: {exc.strerror}", "Mend its permissions.") from exc
    except (ValueError, RecursionError) as exc:  # of which TOMLDecodeError and UnicodeDecodeError are two
        raise SettingError(source, str(path), f"is not valid TOML: {exc}", "Mend the file.") from exc
    found: _Given = {}
    for name, value in table.items():
        spelt = f"{path}: {name}"
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            mend = f"Did you mean {near[0]}?" if near else "Remove it."
            raise SettingError(spelt, _shown(near[0] if near else name, value), "there is no such setting", mend)
        found[name] = (spelt, _typed(spelt, name, value))
    return found


def _from_environ(environ: Mapping[str, str]) -> _Given:
    found: _Given = {}
    for name in FIELDS:
        spelt = f"{PREFIX}{name.upper()}"
        text = environ.get(spelt)
        if text:
            if text.startswith("tcp://"):
                mend = "Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod."
                raise SettingError(spelt, _shown(name, text), "is a service link", mend)
            found[name] = (spelt, _parsed(spelt, name, text))
    return found


def _from_flags(flags: Mapping[str, Any]) -> _Given:
    found: _Given = {}
    for name, value in flags.items():
        if value is not None:
            parse = _parsed if isinstance(value, str) else _typed
            found[name] = (flag(name), parse(flag(name), name, value))
    return found


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parsed(spelt: str, name: str, text: str) -> Any:
    """The text of a flag or an environment variable as the type of field `name`."""
    wanted = kind(name)
    if wanted is str:
        return text
    if wanted is bool:
        if text.lower() not in _TRUTH:
            raise SettingError(spelt, text, "is not a truth value", "Use true or false.")
        return _TRUTH[text.lower()]
    try:
        return wanted(text)
    except ValueError:
        what = "a whole number" if wanted is int else "a number"
        unit = FIELDS[name].metadata["unit"]
        mend = f"Write digits only; the unit is {unit}." if unit else "Write digits only."
        raise SettingError(spelt, text, f"is not {what}", mend) from None


def _typed(spelt: str, name: str, value: Any) -> Any:
    """The value of a file's key, which has a type already, as the type of field `name`."""
    wanted = kind(name)
    if wanted is float and type(value) is int and abs(value) < 1 << 62:
        return float(value)
    if type(value) is wanted:
        return value
    what, mend = {
        str: ("text", 'Put it in quotes: "…".'),
        int: ("a whole number", "Write digits without quotes."),
        float: ("a number", "Write digits without quotes."),
        bool: ("a truth value", "Use true or false, without quotes."),
    }[wanted]
    raise SettingError(spelt, _shown(name, value), f"must be {what}", mend)
