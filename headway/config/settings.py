"""The table of settings: every field with its default, its help, its unit and its group."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from headway.config.broker import shown_url
from headway.config.checks import CHECKS
from headway.config.fields import hidden as _hidden
from headway.config.fields import joined as _joined
from headway.config.fields import setting as _setting
from headway.config.fields import unset_wait as _unset_wait
from headway.config.models import ModelSettings
from headway.config.readings import Readings
from headway.config.scaling import ScalingSettings
from headway.core.policies import POLICIES
from headway.dialects import AUTO, DIALECTS
from headway.errors import SettingError

PREFIX = "HEADWAY_"
"""Prefix of the names of environment variables."""
CHARS = "chars"
"""Value of `weight` for which an input weighs its characters."""

_SERVICE = "Service"
_WORKERS = "Workers"
_BATCHING = "Batching"
_FLEET = "Several processes"
_TIMEOUTS = "Deadlines"
_TIERS = "Tiers"
_IDENTITY = "Identity and rate limits"
_LEDGER = "Ledger"
_SHARING = "Tasks, cache and collapsing"
_LIMITS = "Limits at the door"
_REMOTE = "Remote API"
_ADMIN_LOG = "Administration and log"


@dataclass(frozen=True, kw_only=True)
class Settings(Readings, ScalingSettings):
    """Settings of one process. Built by `load`, or directly in tests; a wrong value raises SettingError."""

    host: str = _setting("127.0.0.1", _SERVICE, "Address of the public port; 0.0.0.0 for every interface.")
    port: int = _setting(8000, _SERVICE, "Public port; 0 lets the system choose.")
    grpc_port: int = _setting(0, _SERVICE, "Public port of gRPC, at the same address; 8081 is usual; 0: none.")
    grpc_max_age_s: float = _setting(
        300.0,
        _SERVICE,
        "Age at which the client of a gRPC connection is told to open another one, so that new gateways get their part; 0: "
        "never.",
        "s",
    )
    tls_cert: str = _setting(
        "",
        _SERVICE,
        "Certificate of all ports, which then speak TLS: a file in PEM format, with the certificates between it and an "
        "authority; read again when it changes.",
    )
    tls_key: str = _setting("", _SERVICE, "File of its key, not encrypted; left out: in the file of `tls_cert`.")
    tls_client_ca: str = _setting(
        "", _SERVICE, "File of the authorities of which clients must show a certificate; left out: they need none."
    )
    model: str = _setting("default", _SERVICE, "Name under which the target is served.")
    model_version: str = _setting("1", _SERVICE, "Version reported in answers.")
    version_weights: str = _setting(
        "",
        _SERVICE,
        "Weights of a model's versions, as 3=95,4=5; 0: it gets nothing new; left out: by their workers; SIGHUP reads them again.",
    )
    default_model: str = _setting(
        "",
        _SERVICE,
        "Of several models, the one that requests mean which name none; left out: such a request gets 400, unless one of them "
        "has the name of `model`.",
    )
    chat_template: str = _setting(
        "plain",
        _SERVICE,
        "How the messages of a chat become one text: plain, a line `role: content` for each; or a file with a Jinja template "
        "as models on the Hugging Face Hub have it.",
    )
    lame_duck_ms: float = _setting(
        0.0,
        _SERVICE,
        "When shutting down: how long to serve on while /readyz says 503 already, for balancers to notice; at least as "
        "long as they take for that.",
        "ms",
    )
    drain_timeout_ms: float = _setting(
        30_000.0,
        _SERVICE,
        "Longest wait for requests in flight when shutting down; left out, never less than a request or a batch may take.",
        "ms",
    )
    reload: bool = _setting(
        False,
        _SERVICE,
        "For development: replace the workers when a Python file in the target's folder, or below it, changes.",
    )

    target_arguments: str = _setting(
        "",
        _WORKERS,
        "Arguments that a class TARGET is built with, if they are not in TARGET itself: literals, as in "
        "\"'small', layers=3\"; in the file also a table [target.arguments].",
        show=_hidden,
    )
    workers: int = _setting(
        1,
        _WORKERS,
        "Worker processes, one per GPU; for a remote API: calls in flight at once; left out: as many as `devices` names.",
    )
    devices: str = _setting(
        "",
        _WORKERS,
        "Comma-separated GPUs, one per worker: numbers or UUIDs as in CUDA_VISIBLE_DEVICES, or cpu (cpu alone: for all); left "
        "out: those that CUDA_VISIBLE_DEVICES allows, else all of the machine.",
    )
    models_per_gpu: int = _setting(
        0,
        _WORKERS,
        "Of several models, those that a GPU holds loaded at most, each in a process of its own: all share all GPUs, and what "
        "is not loaded anywhere is loaded when it is asked for; 0: each model has workers and GPUs of its own.",
    )
    min_warm: int = _setting(
        0, _WORKERS, "With `models_per_gpu`: GPUs on which a model is kept loaded at least.", "GPUs"
    )
    start_timeout_ms: float = _setting(
        300_000.0, _WORKERS, "Longest time for a worker to load the target and pass its warm-up batch.", "ms"
    )
    recycle_rss_mb: int = _setting(
        0, _WORKERS, "Replace a worker whose resident memory (not the GPU's) exceeds this; 0: never.", "MiB"
    )
    arena_mb: int = _setting(
        64,
        _WORKERS,
        "Most memory that a worker process shares with its host for large inputs and outputs, which else go through a pipe; "
        "only what was needed once is taken; 0: none.",
        "MiB",
    )
    recycle_after_s: float = _setting(0.0, _WORKERS, "Replace a worker after this age; 0: never.", "s")

    max_batch_size: int = _setting(32, _BATCHING, "Largest batch the target takes.", "inputs")
    max_batch_weight: int = _setting(
        0,
        _BATCHING,
        "Most weight of a batch, beside its number of inputs; an input heavier than that runs alone; 0: inputs are not "
        "weighed.",
    )
    weight: str = _setting(
        CHARS,
        _BATCHING,
        "What an input weighs: chars, its number of characters, or the name of a function of the target, such as tokens.",
    )
    max_wait_ms: float | None = _setting(
        None,
        _BATCHING,
        f"Longest wait for batch-mates, for {_joined((name for name, policy in POLICIES.items() if policy.aims), 'and')} "
        f"the wait it aims at; unset: {_unset_wait()}.",
        "ms",
    )
    policy: str = _setting("paced", _BATCHING, f"When a batch leaves: {_joined(POLICIES, 'or')}.")
    max_queue: int = _setting(20_000, _BATCHING, "Most entries waiting at once, over all tiers.", "inputs")
    max_queue_mb: int = _setting(
        1024,
        _BATCHING,
        "Most memory for inputs that have no answer yet, of which a tenant may have as much as is free; with a broker, of all "
        "processes together, and never more than half of its `maxmemory`.",
        "MiB",
    )
    shed_depths: str = _setting(
        "auto",
        _BATCHING,
        "Entries waiting above which the lowest tier is refused, and above which all but the highest are, as in 100,500; "
        "auto: as many as can be answered in time.",
    )

    broker: str = _setting(
        "",
        _FLEET,
        "URL of the Redis or Valkey that gateways and workers share: redis://USER:PASSWORD@HOST:PORT/DB, rediss:// for "
        "TLS, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT; with a password better set in "
        "the environment; left out: the queue is in this process.",
        show=shown_url,
    )
    broker_prefix: str = _setting("headway", _FLEET, "What the broker's keys begin with; one for each installation.")
    broker_timeout_ms: float = _setting(
        1000.0, _FLEET, "Longest time for one call to the broker before it counts as failed.", "ms"
    )
    lease_ms: float = _setting(
        3000.0,
        _FLEET,
        "How long a worker may be silent before what it runs is given to another; left out, 2000 ms more than "
        "`broker_timeout_ms` where that is longer.",
        "ms",
    )
    large_payload_kb: int = _setting(
        64,
        _FLEET,
        "Inputs and outputs larger than this are stored apart from the queue in the broker, which keeps its steps short; 0: "
        "none.",
        "KiB",
    )
    shards: int = _setting(1, _FLEET, "Queues that each model is split into; 16 is usual when one Redis is too few.")
    name: str = _setting(
        "", _FLEET, "Name of this process in the fleet, which no other has; left out: host name and process id."
    )
    zone: str = _setting(
        "",
        _FLEET,
        "Zone that this process is in, for gateways and workers: batches form within a zone, and others help where one is "
        "behind; left out: none.",
    )
    expected_workers: int = _setting(
        0,
        _FLEET,
        "Healthy workers that the fleet should have, for status, readiness and alerts; 0: nobody has said.",
        "workers",
    )
    fallback: str = _setting(
        "",
        _FLEET,
        "Function or remote batch API that a gateway asks while the broker is gone, written as TARGET is, or NAME=TARGET; of "
        "several models each may have one in its table; left out: requests then get 503.",
    )
    fallback_version: str = _setting(
        "",
        _FLEET,
        "Version that answers of `fallback` tell, and that requests may name then; left out: `model_version`, and none.",
    )
    fallback_concurrency: int = _setting(1, _FLEET, "Batches that a gateway runs at once on `fallback`.", "batches")
    target_utilisation: float = _setting(
        1.0,
        _FLEET,
        "Share of the measured capacity, 0.1 to 1, above which the lowest tier is held to what the others leave.",
    )

    queue_timeout_ms: float = _setting(
        2000.0,
        _TIMEOUTS,
        "Longest wait in the queue before the first run; left out, never beyond the time in all.",
        "ms",
    )
    gpu_timeout_ms: float = _setting(3000.0, _TIMEOUTS, "Longest run of one batch; then its worker is killed.", "ms")
    request_timeout_ms: float = _setting(4000.0, _TIMEOUTS, "Longest time for a request in all, at most 600000.", "ms")

    tiers: str = _setting("enterprise,paid,free", _TIERS, "Tiers, highest first, comma-separated.")
    default_tier: str = _setting("paid", _TIERS, "Tier of every request, when there is no file of keys.")
    reserved_share: float = _setting(0.1, _TIERS, "Share of each batch, 0 to 0.5, kept for lower tiers when they wait.")
    keys: str = _setting(
        "",
        _IDENTITY,
        "Where API keys are: a TOML file, or `ledger` for the ledger's database; without it and `jwt` anybody may ask.",
    )
    jwt: str = _setting("", _IDENTITY, "TOML file of the issuers whose JSON Web Tokens are taken (see the guide).")
    keys_retention_days: float = _setting(
        30.0, _IDENTITY, "Time after its end at which a key is removed from the ledger's database; 0: never.", "days"
    )
    user_rate: float = _setting(
        1000.0, _IDENTITY, "Requests a minute of a user whose key has no rate of its own; 0: no limit."
    )
    user_burst: float = _setting(
        0.0,
        _IDENTITY,
        "Requests that a user whose key has no burst of its own may send at once; 0: ten seconds' worth of `user_rate`.",
    )
    tier_rates: str = _setting(
        "",
        _IDENTITY,
        "Requests a minute of all users of a tier together, as in free=60000,paid=600000; unset: no limit.",
    )

    ledger: str = _setting(
        "",
        _LEDGER,
        "Where every request is recorded: sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/DATABASE; with a "
        "password better set in the environment; left out: nowhere.",
        show=shown_url,
    )
    ledger_retention_days: float = _setting(30.0, _LEDGER, "Age at which records are removed; 0: never.", "days")
    ledger_buffer: int = _setting(
        100_000, _LEDGER, "Most records that wait for a database that is slow or away; more are dropped and counted."
    )
    ledger_rows: str = _setting("ended", _LEDGER, "Requests that are recorded: `ended`, or `all`, as `queued` first.")
    ledger_content: bool = _setting(False, _LEDGER, "Record inputs and outputs too, which else are written to no disk.")

    cache: bool = _setting(False, _SHARING, "Keep outputs and answer the same request of the same tenant with them.")
    cache_ttl_s: float = _setting(300.0, _SHARING, "How long the cache keeps an output.", "s")
    collapse: bool = _setting(False, _SHARING, "Run identical requests that a tenant sends at the same time only once.")
    result_ttl_s: float = _setting(
        600.0, _SHARING, "How long the outcome of a task, or of an Idempotency-Key, is kept.", "s"
    )
    task_timeout_ms: float = _setting(
        30_000.0,
        _SHARING,
        "Longest time for a task (Prefer: respond-async) in all, waiting included; left out, never less than for another "
        "request.",
        "ms",
    )
    kept_mb: int = _setting(
        256,
        _SHARING,
        "Most memory for what is kept; with a broker, of each server, and never more than a quarter of its `maxmemory`.",
        "MiB",
    )
    kept_tenant_mb: int = _setting(64, _SHARING, "Most of `kept_mb` for what one tenant keeps.", "MiB")

    max_body_bytes: int = _setting(1_048_576, _LIMITS, "Largest request body.", "bytes")
    max_header_bytes: int = _setting(16_384, _LIMITS, "Largest request line and header together.", "bytes")
    max_input_chars: int = _setting(0, _LIMITS, "Longest input; 0: as long as the body may be.", "characters")
    max_parameters: int = _setting(64, _LIMITS, "Most members of `parameters`.")
    control_chars: str = _setting(
        "keep",
        _LIMITS,
        "What becomes of control characters other than tab and line ends in an input: keep, strip or refuse. "
        "U+0000 is always refused.",
    )
    input_policy: str = _setting(
        "",
        _LIMITS,
        "TOML file of rules on inputs: normalisation, unseen characters, patterns, a function (see docs/input-policy.md); left "
        "out: none.",
    )
    max_bodies_mb: int = _setting(
        256,
        _LIMITS,
        "Most bytes of bodies on their way and of large or unread answers at once, of all requests by all ports together; half of it of the outputs of one request, at most 32 MiB over gRPC.",
        "MiB",
    )
    max_connections: int = _setting(10_000, _LIMITS, "Most open client connections.")
    max_caller_connections: int = _setting(
        0,
        _LIMITS,
        "Most open connections of one tenant or, without keys, of one address; 0: nine times as many as are free, without keys "
        "no bound.",
    )
    cors_origins: str = _setting(
        "", _LIMITS, "Comma-separated origins whose pages may ask from a browser; *: all; left out: none."
    )
    header_timeout_ms: float = _setting(10_000.0, _LIMITS, "Longest time to receive a request's header.", "ms")
    body_timeout_ms: float = _setting(10_000.0, _LIMITS, "Longest time to receive a request's body.", "ms")
    keep_alive_ms: float = _setting(30_000.0, _LIMITS, "How long an idle connection stays open.", "ms")

    remote_format: str = _setting(
        AUTO,
        _REMOTE,
        f"Dialect of the remote API: {_joined(DIALECTS, 'or')}; auto: the one that the path of its URL tells, else list.",
    )
    remote_model: str = _setting(
        "", _REMOTE, "Name of the model over there, for dialects that name it in each request or in the path."
    )
    remote_rate: float = _setting(
        0.0, _REMOTE, "Most calls to the API in a second, from all slots of a process; 0: no bound.", "calls/s"
    )
    remote_token: str = _setting(
        "", _REMOTE, "Bearer token sent to the remote API; better set in the environment.", show=_hidden
    )
    remote_headers: str = _setting(
        "",
        _REMOTE,
        "Header fields sent to the remote API, one `Name: value` a line; only in the environment or the file.",
        show=_hidden,
        has_flag=False,
    )
    remote_headers_file: str = _setting(
        "",
        _REMOTE,
        "File of such header fields, one `Name: value` a line, which is read again when it changes.",
    )
    remote_ca: str = _setting(
        "",
        _REMOTE,
        "File of the authorities, in PEM format, of which a remote API at https:// or grpcs:// must show a certificate; read again when it "
        "changes; left out: those of the system.",
    )
    remote_cert: str = _setting(
        "",
        _REMOTE,
        "Certificate shown to the remote API: a file in PEM format, with the certificates between it and an authority; read "
        "again when it changes; left out: none.",
    )
    remote_key: str = _setting("", _REMOTE, "File of its key, not encrypted; left out: in the file of `remote_cert`.")

    admin_host: str = _setting(
        "127.0.0.1", _ADMIN_LOG, "Address of the admin port; off loopback an admin token is required."
    )
    admin_port: int = _setting(
        9000, _ADMIN_LOG, "Admin port (metrics, health, workers, dead letters); 0 lets the system choose."
    )
    admin_token: str = _setting(
        "",
        _ADMIN_LOG,
        "Service token that admin routes ask for (Authorization: Bearer …), while it changes NEW,OLD; better set in the "
        "environment.",
        show=_hidden,
    )
    admin_names: str = _setting(
        "",
        _ADMIN_LOG,
        "Names, with commas between them, by which the admin port may be asked besides loopback and IP addresses.",
    )
    promise_ms: float = _setting(
        200.0,
        _ADMIN_LOG,
        "Latency that is promised for 95 % of the requests; the dashboard shows it beside theirs.",
        "ms",
    )
    log_level: str = _setting("info", _ADMIN_LOG, "Least important line that is logged: debug, info, warning or error.")
    log_json: bool = _setting(False, _ADMIN_LOG, "Log lines as JSON.")
    access_log: float = _setting(
        0.0, _ADMIN_LOG, "Share of the requests, 0 to 1, that are logged with how they ended and what took how long."
    )

    trace: bool = _setting(
        False, _ADMIN_LOG, "Record traces, and send them by OpenTelemetry's protocol to where the variables OTEL_… say."
    )

    models: tuple[ModelSettings, ...] = ()
    """Models of which each may have settings of its own; empty: there is one, named by `model`."""
    weights_file: str = dataclasses.field(default="", compare=False, repr=False)
    """File that weights of versions are read from again; empty where they come from elsewhere."""

    def __post_init__(self) -> None:
        for check in CHECKS:
            check(self)
        _ = self.served

    @cached_property
    def runs(self) -> Mapping[str, Settings]:
        """Settings of the workers of each model by its name or, where it has versions here, of each of them by NAME@VERSION.

        Raises:
            SettingError: a setting of its own is wrong; it is named `models.NAME.FIELD`.
        """
        if not self.models:
            return MappingProxyType({self.model: self})
        found = {}
        for one in self.models:
            if not one.versions:
                found[one.name] = self._of_model(one.name, {**dict(one.values), "model": one.name})
            for each in one.versions:
                own = {**dict(one.values), **dict(each.values), "model": one.name, "model_version": each.name}
                found[f"{one.name}@{each.name}"] = self._of_model(f"{one.name}@{each.name}", own)
        return MappingProxyType(found)

    @cached_property
    def served(self) -> Mapping[str, Settings]:
        """Settings of each model, by its name: those of the process, with what the model has of its own. See `runs`."""
        if not self.models:
            return self.runs
        found = {}
        for one in self.models:
            if versions := [self.runs[f"{one.name}@{each.name}"] for each in one.versions]:
                largest = max(each.max_batch_size for each in versions)
                own = {"model": one.name, "model_version": versions[0].model_version, "max_batch_size": largest}
                found[one.name] = self._of_model(one.name, {**dict(one.values), **own})
            else:
                found[one.name] = self.runs[one.name]
        return MappingProxyType(found)

    def _of_model(self, name: str, own: dict[str, Any]) -> Settings:
        try:
            return dataclasses.replace(self, models=(), default_model="", **own)
        except SettingError as exc:
            raise SettingError(f"models.{name}.{exc.setting}", exc.value, exc.reason, exc.hint) from None

    @cached_property
    def default(self) -> str:
        """Name of the model that a request means which names none; empty: there is none."""
        names = self.served
        if self.default_model:
            return self.default_model
        return next(iter(names)) if len(names) == 1 else self.model if self.model in names else ""

    @cached_property
    def longest_request_s(self) -> float:
        """Seconds that a request to any model may take in all."""
        return max(one.request_timeout_ms for one in self.served.values()) / 1000

    @cached_property
    def longest_task_s(self) -> float:
        """Seconds that a task of any model may take in all."""
        return max(one.task_timeout_ms for one in self.served.values()) / 1000


_LAST = frozenset(f.name for f in dataclasses.fields(ScalingSettings))
FIELDS: dict[str, dataclasses.Field[Any]] = {
    f.name: f for f in sorted(dataclasses.fields(Settings), key=lambda one: one.name in _LAST) if f.metadata
}
"""Fields of Settings by name, in the order in which they are shown.

Metadata: `help`, `unit`, `group`, `has_flag`, and `show`, which turns a text that holds a secret into what may be printed.
"""

_KINDS: dict[str, type] = {
    name: next(t for t in (typing.get_args(hint) or (hint,)) if t is not type(None))
    for name, hint in typing.get_type_hints(Settings).items()
    if name in FIELDS
}


def kind(name: str) -> type:
    """The type of field `name`: str, int, float or bool."""
    return _KINDS[name]


def flag(name: str) -> str:
    """The command-line spelling of `name`, most often a field; that of the environment for one that has no flag."""
    if name in FIELDS and not FIELDS[name].metadata["has_flag"]:
        return f"{PREFIX}{name.upper()}"
    return f"--{name.replace('_', '-')}"
