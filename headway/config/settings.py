"""The table of settings, and checks that involve several settings. An error names a setting as its user wrote it:
`--max-batch-size`, `HEADWAY_MAX_BATCH_SIZE` or `headway.toml: max_batch_size`. So checks put field names in backticks, and
`sources.load` replaces them with the names that the user wrote."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from headway.config.fields import (
    ADDRESS,
    FUNCTION,
    HOST_NAMES,
    NAME,
    NAME_OR_NONE,
    ORIGINS,
    REMOTE_MODEL,
    TOKEN,
    Own,
    RolePart,
    Setting,
    Term,
    hidden,
    joined,
    setting,
    unset_wait,
)
from headway.config.target import ModelSettings
from headway.config.urls import broker_fault, database_fault, shown_url
from headway.core import policies, versions, weight_estimate
from headway.core.deadlines import MOST_MS
from headway.core.excerpt import nearest
from headway.core.policies import POLICIES
from headway.core.scaling import rules as scale_rules_of
from headway.dialects import AUTO, NAMES
from headway.errors import SettingError

ALL_ROWS = "all"  # Value of `ledger_rows`.
NONE, LOCAL = "none", "local"

MAX_REQUEST_TIMEOUT_MS = float(MOST_MS)  # Longest deadline for a request, for its wait and for its batch, in ms.
MAX_BATCH = 4096
MOST_WORKERS = 256
MOST_WORKERS_OF_FLEET = 10_000
MOST_WEIGHT = weight_estimate.MOST_WEIGHT
PREFIX = "HEADWAY_"
CHARS = "chars"  # Value of `weight`: an input weighs as much as it has characters.

_SERVICE = "Service"
_WORKERS = "Workers"
_BATCHING = "Batching"
_FLEET = "Several processes"
_TIMEOUTS = "Deadlines"
_TIERS = "Tiers"
_IDENTITY = "Identity and rate limits"
_LEDGER = "Ledger"
_BULK = "Bulk jobs"
_SHARING = "Tasks, cache and collapsing"
_LIMITS = "Limits at the door"
_REMOTE = "Remote API"
_ADMIN_LOG = "Administration and log"
_SCALING = "Autoscaler"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one process. The constructor raises SettingError for a wrong value."""

    max_header_bytes: ClassVar[int] = 16_384  # Largest size of a request line and header together.
    max_parameters: ClassVar[int] = 64
    large_payload_bytes: ClassVar[int] = 64 << 10  # Larger values are stored outside the queue, so that it stays fast.
    keys_retention_s: ClassVar[float] = 30 * 86_400.0  # Seconds that an expired key stays in the ledger's database.
    arena_bytes: ClassVar[int] = 64 << 20  # Maximum memory shared with a worker process for large inputs and outputs.
    least_drain_s: ClassVar[float] = 30.0  # Least time that a shutdown waits for requests in flight; see `drain_s`.
    grpc_max_age_s: ClassVar[float] = 300.0  # gRPC clients must reconnect after this, so that new gateways get some.

    # fmt: off
    host: str = setting("127.0.0.1", _SERVICE,
        "Address of the public port; 0.0.0.0 for all interfaces.", form=ADDRESS, parts=RolePart.GATEWAY, common=True)
    port: int = setting(8000, _SERVICE,
        "Public port; 0 lets the system choose.", within=(0, 65_535), parts=RolePart.GATEWAY, common=True)
    grpc_port: int = setting(0, _SERVICE,
        "Public gRPC port, at the same address; usually 8081; 0: none.", within=(0, 65_535), parts=RolePart.GATEWAY, common=True)
    tls_cert: str = setting("", _SERVICE,
        "Certificate for all ports, which then use TLS: a PEM file that includes the intermediate certificates; reloaded when it changes.",
        common=True)
    tls_key: str = setting("", _SERVICE,
        "File with the certificate's unencrypted private key; if left out: the key is in the file of `tls_cert`.")
    tls_client_ca: str = setting("", _SERVICE,
        "File of authorities that client certificates must be signed by; if left out: clients need no certificate.")
    model: str = setting("default", _SERVICE, "Name under which the target is served.", form=NAME, common=True)
    model_version: str = setting("1", _SERVICE,
        "Version reported in answers.", form=NAME, parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.MODEL, term=Term.ALWAYS)
    version_weights: str = setting("", _SERVICE,
        "Weights of a model's versions, such as 3=95,4=5; 0: no new requests; if left out: in proportion to their workers. SIGHUP reloads them.",
        needs="broker", parts=RolePart.GATEWAY, own=Own.MODEL)
    default_model: str = setting("", _SERVICE,
        "Model for requests that don't name one, if there are several models; if left out: the model named by `model`, or else such requests get 400.",
        common=True)
    chat_template: str = setting("plain", _SERVICE,
        "How a chat is turned into one string: plain, a line `role: content` per message; or a file with a Jinja template, like those of "
        "models on the Hugging Face Hub.",
        parts=RolePart.GATEWAY, own=Own.MODEL)
    lame_duck_ms: float = setting(0.0, _SERVICE,
        "How long to keep serving during a shutdown while /readyz already answers 503; at least as long as load balancers take to notice.",
        "ms", within=(0, 600_000), parts=RolePart.GATEWAY)
    reload: bool = setting(False, _SERVICE,
        "For development: replace the workers when a Python file in the target's folder, or below it, changes.",
        parts=RolePart.BATCHERS, common=True)

    workers: int = setting(1, _WORKERS,
        "Number of worker processes, one per GPU; for a remote API: maximum number of calls in flight; if left out: as many as `devices` names.",
        within=(1, MOST_WORKERS), parts=RolePart.BATCHERS, own=Own.VERSION, common=True)
    devices: str = setting("", _WORKERS,
        "Comma-separated GPUs, one per worker: numbers or UUIDs as in CUDA_VISIBLE_DEVICES, or cpu (cpu alone: for all); if left out: those "
        "that CUDA_VISIBLE_DEVICES allows, or else all GPUs of the machine.",
        parts=RolePart.BATCHERS, own=Own.VERSION, common=True)
    models_per_gpu: int = setting(0, _WORKERS,
        "With several models: how many of them a GPU keeps loaded, each in its own process. All models then share all GPUs, and are loaded "
        "when a request needs them. 0: each model has its own workers and GPUs.",
        within=(0, 256))
    min_warm: int = setting(0, _WORKERS,
        "With `models_per_gpu`: minimum number of GPUs on which a model stays loaded.",
        "GPUs", within=(0, MOST_WORKERS), needs="models_per_gpu", own=Own.MODEL)
    start_timeout_ms: float = setting(300_000.0, _WORKERS,
        "Maximum time for a worker to load the target and pass its warm-up batch. The autoscaler waits twice as long for a new worker, which "
        "may need a machine first.",
        "ms", within=(100, 3_600_000), parts=RolePart.GATEWAY | RolePart.BATCHERS | RolePart.CONTROLLER, own=Own.VERSION)
    recycle_rss_mb: int = setting(0, _WORKERS,
        "Replace a worker whose resident memory (not the GPU's) exceeds this; 0: never.",
        "MiB", within=(0, 1 << 24), parts=RolePart.BATCHERS, own=Own.VERSION)

    max_batch_size: int = setting(32, _BATCHING,
        "Largest batch that the target accepts.", "inputs", within=(1, MAX_BATCH), own=Own.VERSION, term=Term.ALWAYS, common=True)
    max_batch_weight: int = setting(0, _BATCHING,
        "Maximum weight of a batch, in addition to its maximum size; a heavier input runs alone; 0: no limit.",
        within=(0, MOST_WEIGHT), own=Own.MODEL, term=Term.ALWAYS)
    weight: str = setting(CHARS, _BATCHING,
        "Weight of an input: chars, its number of characters; or the name of a function of the target, such as tokens.",
        form=FUNCTION, needs="max_batch_weight", own=Own.MODEL, term=Term.ALWAYS)
    max_wait_ms: float | None = setting(None, _BATCHING,
        f"Maximum wait for a fuller batch, or for {joined((name for name, policy in POLICIES.items() if policy.aims), 'and')} "
        f"the wait to aim at; unset: {unset_wait()}.",
        "ms", within=(0, MAX_REQUEST_TIMEOUT_MS), parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION, common=True)
    policy: str = setting("paced", _BATCHING,
        f"When a batch leaves: {joined(POLICIES, 'or')}.",
        among=policies.NAMES, parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION)
    max_queue: int = setting(20_000, _BATCHING,
        "Maximum number of entries waiting at a time, over all tiers. Five times as many records may wait for a slow ledger; further records "
        "are dropped and counted.",
        "inputs", within=(1, 10_000_000), parts=RolePart.GATEWAY, own=Own.MODEL, term=Term.CHANGED)
    shed_depths: str = setting("auto", _BATCHING,
        "Two numbers of waiting entries, such as 100,500: above the first, the lowest tier is refused; above the second, all but the highest "
        "tier are refused. auto: as many as can be answered in time.",
        own=Own.MODEL, term=Term.CHANGED)

    broker: str = setting("", _FLEET,
        "URL of the Redis or Valkey that gateways and workers share: redis://USER:PASSWORD@HOST:PORT/DB, rediss:// for TLS, "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT. Better set in the environment if it has a password. "
        "If left out: the queue is in this process.",
        show=shown_url, common=True)
    broker_prefix: str = setting("headway", _FLEET,
        "Prefix of all keys in the broker; each installation needs its own.", form=NAME, needs="broker")
    broker_timeout_ms: float = setting(1000.0, _FLEET,
        "Time after which a call to the broker counts as failed. If a worker is unresponsive for 2 s longer than that, its batch goes to "
        "another worker.",
        "ms", within=(10, 60_000), needs="broker")
    shards: int = setting(1, _FLEET,
        "Number of queues that each model is split into; usually 16 if one Redis is not enough.", within=(1, 256), needs="broker")
    name: str = setting("", _FLEET,
        "Name of this process, unique in the fleet; if left out: host name and process id.", form=NAME_OR_NONE)
    expected_workers: int = setting(0, _FLEET,
        "Number of healthy workers that the fleet should have, for status, readiness and alerts; 0: unknown.", "workers", within=(0, 1_000_000))
    fallback: str = setting("", _FLEET,
        "Function or remote batch API that a gateway calls while the broker is unreachable: TARGET, or NAME=TARGET. Each of several models "
        "may have its own in its table. Its answers include `model_version`. Meanwhile, requests that name a version get 503; without a "
        "fallback, all requests do. A function runs one batch at a time, an API four.",
        needs="broker", parts=RolePart.GATEWAY, own=Own.MODEL, common=True)
    target_utilisation: float = setting(1.0, _FLEET,
        "Share of the measured capacity, 0.1 to 1, that requests of the lowest tier may use together with all others.",
        within=(0.1, 1), parts=RolePart.CONTROLLER)

    queue_timeout_ms: float = setting(2000.0, _TIMEOUTS,
        "Maximum wait in the queue before the first run; by default never longer than the total time for a request.",
        "ms", within=(1, MAX_REQUEST_TIMEOUT_MS), parts=RolePart.GATEWAY, own=Own.MODEL, term=Term.CHANGED, common=True)
    gpu_timeout_ms: float = setting(3000.0, _TIMEOUTS,
        "Maximum run time of a batch, after which its worker is killed. A shutdown waits at least as long.",
        "ms", within=(1, MAX_REQUEST_TIMEOUT_MS), parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION, common=True)
    request_timeout_ms: float = setting(4000.0, _TIMEOUTS,
        "Maximum total time for a request, at most 600000. A shutdown waits this long for requests in flight, and at least 30 s.",
        "ms", within=(1, MAX_REQUEST_TIMEOUT_MS), parts=RolePart.GATEWAY, own=Own.MODEL, term=Term.CHANGED, common=True)

    tiers: str = setting("enterprise,paid,free", _TIERS, "Comma-separated tiers, the highest first.")
    default_tier: str = setting("paid", _TIERS, "Tier of all requests if the service uses neither keys nor tokens.")
    reserved_share: float = setting(0.1, _TIERS,
        "Share of each batch, 0 to 0.5, reserved for lower tiers while they wait.",
        within=(0, 0.5), parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.MODEL, term=Term.CHANGED)
    keys: str = setting("", _IDENTITY,
        "API keys: a TOML file, or `ledger` for the ledger's database; with neither this nor `jwt`, anybody may send requests.",
        parts=RolePart.GATEWAY, common=True)
    jwt: str = setting("", _IDENTITY,
        "TOML file of the issuers whose JSON Web Tokens are accepted (see docs/security.md).", parts=RolePart.GATEWAY)
    user_rate: float = setting(1000.0, _IDENTITY,
        "Requests per minute that a user may send whose key has no rate of its own; 0: no limit.", within=(0, 1e9), parts=RolePart.GATEWAY)
    tier_rates: str = setting("", _IDENTITY,
        "Requests per minute that all users of a tier may send together, such as free=60000,paid=600000; unset: no limit.", parts=RolePart.GATEWAY)

    ledger: str = setting("", _LEDGER,
        "Where every request is recorded: sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/DATABASE. Better set in the environment "
        "if it has a password. If left out: nowhere.",
        show=shown_url, common=True)
    keep_days: float = setting(30.0, _LEDGER,
        "Age at which request records, bulk files and finished bulk jobs are removed; 0: never.", "days", within=(0, 36_500))
    ledger_rows: str = setting("ended", _LEDGER,
        "Requests to record: `ended`, once they have ended; or `all`, with the status `queued` at first.", among=("ended", ALL_ROWS), needs="ledger")
    ledger_content: bool = setting(False, _LEDGER,
        "Also record inputs and outputs. Otherwise, they are never written to disk.", needs="ledger")

    bulk_dir: str = setting("", _BULK,
        "Folder for the files of bulk jobs (see docs/bulk.md), or a bucket, such as s3://BUCKET/FOLDER, shared by all gateways. If left out: "
        "no bulk jobs.",
        parts=RolePart.GATEWAY, common=True)
    bulk_max_bytes: int = setting(10 << 30, _BULK,
        "Maximum bytes of files that a tenant may store. It also allows one file per MiB, one line of a job per KiB, and one unfinished job "
        "per 100 MiB; at least 10 files and one job.",
        within=(1, 1 << 50), parts=RolePart.GATEWAY, needs="bulk_dir")

    cache: bool = setting(False, _SHARING,
        "Cache outputs, and reuse them for identical requests of the same tenant.", own=Own.MODEL, term=Term.CHANGED, common=True)
    collapse: bool = setting(False, _SHARING,
        "Run identical requests only once if a tenant sends them at the same time.", own=Own.MODEL, term=Term.CHANGED)
    result_ttl_s: float = setting(600.0, _SHARING,
        "How long the outcome of a task or of an Idempotency-Key is kept. Outputs in the cache are kept half as long.",
        "s", within=(1, 86_400), own=Own.MODEL, term=Term.CHANGED)
    task_timeout_ms: float = setting(30_000.0, _SHARING,
        "Maximum total time for a task (Prefer: respond-async), including its wait; by default never shorter than for other requests.",
        "ms", within=(1, MAX_REQUEST_TIMEOUT_MS), own=Own.MODEL, term=Term.CHANGED)

    max_body_bytes: int = setting(1_048_576, _LIMITS,
        "Largest request body.", "bytes", within=(64, 1 << 30), parts=RolePart.GATEWAY)
    input_policy: str = setting("", _LIMITS,
        "TOML file of rules on inputs: length, normalisation, control and invisible characters, patterns, a function (see "
        "docs/input-policy.md); if left out: none.",
        parts=RolePart.GATEWAY)
    memory_mb: int = setting(1024, _LIMITS,
        "Maximum memory for unanswered inputs; a tenant may use at most as much as remains free. With a broker, the limit is for all "
        "processes together, and never more than half of its `maxmemory`. In addition, a quarter as much is for stored outcomes (with a "
        "broker, on each server, and never more than a quarter of its `maxmemory`), and another quarter for bodies being received and for "
        "large or unread answers. The outputs of one request may take half of the latter, over gRPC at most 32 MiB.",
        "MiB", within=(1, 1 << 22))
    max_connections: int = setting(10_000, _LIMITS,
        "Maximum number of open client connections; with keys or tokens, a tenant may have at most nine times as many as remain free.",
        within=(1, 1_000_000), parts=RolePart.GATEWAY)
    cors_origins: str = setting("", _LIMITS,
        "Comma-separated origins whose pages may send requests from a browser; *: all; if left out: none.",
        form=ORIGINS, parts=RolePart.GATEWAY, common=True)
    read_timeout_ms: float = setting(10_000.0, _LIMITS,
        "Maximum time to receive a request's header, and the same again for its body.", "ms", within=(10, 600_000), parts=RolePart.GATEWAY)
    keep_alive_ms: float = setting(30_000.0, _LIMITS,
        "How long an idle connection stays open.", "ms", within=(10, 3_600_000), parts=RolePart.GATEWAY)

    remote_format: str = setting(AUTO, _REMOTE,
        f"Dialect of the remote API: {joined(NAMES, 'or')}; auto: by the path of its URL, or else list.",
        among=(AUTO, *NAMES), parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION, common=True)
    remote_model: str = setting("", _REMOTE,
        "Name of the remote model, for dialects that name it in each request or in the path.",
        form=REMOTE_MODEL, parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION, common=True)
    remote_rate: float = setting(0.0, _REMOTE,
        "Maximum number of calls to the API per second, from all slots of a process; 0: no limit.",
        "calls/s", within=(0, 100_000), parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION)
    remote_token: str = setting("", _REMOTE,
        "Bearer token sent to the remote API; better set in the environment.",
        show=hidden, form=TOKEN, parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION, common=True)
    remote_headers_file: str = setting("", _REMOTE,
        "File of header fields to send to the remote API, one `Name: value` per line; reloaded when it changes.",
        parts=RolePart.GATEWAY | RolePart.BATCHERS, own=Own.VERSION)
    remote_ca: str = setting("", _REMOTE,
        "PEM file of authorities that the certificate of a remote API at https:// or grpcs:// must be signed by; reloaded when it changes; "
        "if left out: those of the system.",
        parts=RolePart.GATEWAY | RolePart.BATCHERS)
    remote_cert: str = setting("", _REMOTE,
        "Client certificate for the remote API: a PEM file that includes the intermediate certificates; reloaded when it changes; if left out: none.",
        parts=RolePart.GATEWAY | RolePart.BATCHERS)
    remote_key: str = setting("", _REMOTE,
        "File with the certificate's unencrypted private key; if left out: the key is in the file of `remote_cert`.", parts=RolePart.GATEWAY | RolePart.BATCHERS)

    admin_host: str = setting("127.0.0.1", _ADMIN_LOG,
        "Address of the admin port; anything but loopback needs an admin token.", form=ADDRESS)
    admin_port: int = setting(9000, _ADMIN_LOG,
        "Admin port (metrics, health, workers, dead letters); 0 lets the system choose.", within=(0, 65_535), common=True)
    admin_token: str = setting("", _ADMIN_LOG,
        "Service token for admin routes (Authorization: Bearer …), or NEW,OLD while you replace it; better set in the environment.",
        show=hidden, form=TOKEN)
    admin_names: str = setting("", _ADMIN_LOG,
        "Comma-separated host names that requests to the admin port may use, in addition to loopback and IP addresses.",
        form=HOST_NAMES, needs="admin_token")
    promise_ms: float = setting(200.0, _ADMIN_LOG,
        "Latency promised for 95 % of the requests. The dashboard shows it next to the actual latency.",
        "ms", within=(1, MAX_REQUEST_TIMEOUT_MS))
    log_level: str = setting("info", _ADMIN_LOG,
        "Lowest severity to log: debug, info, warning or error.", among=("debug", "info", "warning", "error"), common=True)
    log_json: bool = setting(False, _ADMIN_LOG, "Log lines as JSON.")
    access_log: float = setting(0.0, _ADMIN_LOG,
        "Share of the requests, 0 to 1, to log with their outcome and the time of each stage.", within=(0, 1), parts=RolePart.GATEWAY)
    trace: bool = setting(False, _ADMIN_LOG,
        "Record traces, and send them over OTLP as configured by the OTEL_… variables.")

    autoscale: str = setting(NONE, _SCALING,
        "What changes the number of workers: local, the processes that run them, up to the number of their devices; none: an external scaler "
        "such as KEDA, which reads the published number.",
        among=(NONE, LOCAL), parts=RolePart.CONTROLLER | RolePart.BATCHERS)
    scale_policy: str = setting("rules", _SCALING,
        "How the number of workers is chosen: rules, by `scale_rules`; plan, the fewest that keep `promise_ms` under the measured load, as in "
        "headway plan.",
        among=("rules", "plan"), parts=RolePart.CONTROLLER, own=Own.MODEL)
    min_workers: int = setting(1, _SCALING,
        "Minimum number of workers of a model; 0: no workers while it gets no requests, see `scale_to_zero_after_s`.",
        "workers", within=(0, MOST_WORKERS_OF_FLEET), parts=RolePart.CONTROLLER | RolePart.BATCHERS, own=Own.MODEL)
    max_workers: int = setting(0, _SCALING,
        "Maximum number of workers of a model; 0: with local, as many as there are devices (on the CPU: cores), with none, no limit.",
        "workers", within=(0, MOST_WORKERS_OF_FLEET), parts=RolePart.CONTROLLER | RolePart.BATCHERS, own=Own.MODEL)
    scale_to_zero_after_s: float = setting(0.0, _SCALING,
        "With `min_workers` 0: time without requests after which a model has no workers until its next request; 0: never.",
        "s", within=(0, 86_400), parts=RolePart.CONTROLLER, own=Own.MODEL)
    scale_rules: str = setting("", _SCALING,
        "Rules, as a list of tables in the file, or else as JSON: "
        '[{"queue_above": 500, "for_s": 30, "add": 3}, {"utilisation_below": 0.4, "for_s": 900, "remove": 1}]; if left out: '
        f"{'; '.join(f'{rule}: {rule.change:+d}' for rule in scale_rules_of.USUAL)}.",
        parts=RolePart.CONTROLLER, own=Own.MODEL)
    # fmt: on

    models: tuple[ModelSettings, ...] = ()  # Models with their own settings; empty if there is only `model`.
    weights_file: str = dataclasses.field(default="", compare=False, repr=False)
    """File from which SIGHUP reloads the version weights; empty if they came from elsewhere."""

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            if fault := field.fault(getattr(self, name)):
                refuse(self, name, *fault)
        for check in CHECKS:
            check(self)
        _ = self.served

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers, highest first."""
        return tuple(name.strip() for name in self.tiers.split(","))

    @property
    def default_tier_index(self) -> int:
        return self.tier_names.index(self.default_tier)

    def tier_rate(self, tier: str) -> float:
        """Return how many requests per minute all users of a tier may send together; 0 means no limit."""
        rates = (part.strip().partition("=") for part in self.tier_rates.split(","))
        return next((float(rate) for name, _, rate in rates if name == tier), 0.0)

    @property
    def shed_at(self) -> tuple[int, int] | None:
        """The two numbers in `shed_depths`; None for auto."""
        if self.shed_depths == "auto":
            return None
        lowest, _, all_but_highest = self.shed_depths.partition(",")
        return int(lowest), int(all_but_highest)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Ids in `devices`, one for each worker; empty if the user gave none. A single `cpu` applies to all workers."""
        ids = tuple(part.strip() for part in self.devices.split(",")) if self.devices else ()
        return ids * self.workers if ids == ("cpu",) else ids

    @property
    def lease_s(self) -> float:
        """Seconds after which another worker gets an unresponsive worker's batch: enough for a slow call and two renewals."""
        return self.broker_timeout_ms / 1000 + 2

    @property
    def ledger_backlog(self) -> int:
        """Maximum number of records waiting for the ledger's database: five for each entry in the queue."""
        return max(100, 5 * self.max_queue)

    @property
    def bulk_max_files(self) -> int:
        """Maximum number of files of a tenant: one for each MiB of its quota, but at least 10."""
        return max(10, self.bulk_max_bytes >> 20)

    @property
    def bulk_max_lines(self) -> int:
        return max(1, self.bulk_max_bytes >> 10)

    @property
    def bulk_max_jobs(self) -> int:
        return max(1, self.bulk_max_bytes // (100 << 20))

    @property
    def kept_bytes(self) -> int:
        """Maximum bytes of stored outcomes, of which a tenant may use a quarter."""
        return self.memory_mb << 18

    @property
    def bodies_bytes(self) -> int:
        """Maximum bytes of received bodies and of large or unread answers. The outputs of one request may take half of this."""
        return self.memory_mb << 18

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def broker_shown(self) -> str:
        """The broker's URL without user, password and options; empty if there is none."""
        return shown_url(self.broker)

    @cached_property
    def runs(self) -> Mapping[str, Settings]:
        """Settings of the workers, by NAME or NAME@VERSION. Raises SettingError, possibly for a field `models.NAME.FIELD`."""
        if not self.models:
            return MappingProxyType({self.model: self})
        runs = {}
        for model in self.models:
            values = dict(model.values)
            if not model.versions:
                runs[model.name] = self._of_model(model.name, {**values, "model": model.name})
            for version in model.versions:
                run = f"{model.name}@{version.name}"
                own = {**values, **dict(version.values), "model": model.name, "model_version": version.name}
                runs[run] = self._of_model(run, own)
        return MappingProxyType(runs)

    @cached_property
    def served(self) -> Mapping[str, Settings]:
        """Settings of each model by name. A model's own settings override those of the process. Raises SettingError, as `runs` does."""
        if not self.models:
            return self.runs
        served = {}
        for model in self.models:
            if runs := [self.runs[f"{model.name}@{version.name}"] for version in model.versions]:
                largest = max(run.max_batch_size for run in runs)
                own = {"model": model.name, "model_version": runs[0].model_version, "max_batch_size": largest}
                served[model.name] = self._of_model(model.name, {**dict(model.values), **own})
            else:
                served[model.name] = self.runs[model.name]
        return MappingProxyType(served)

    def _of_model(self, name: str, own: dict[str, Any]) -> Settings:
        try:
            return dataclasses.replace(self, models=(), default_model="", **own)
        except SettingError as exc:
            raise SettingError(f"models.{name}.{exc.setting}", exc.value, exc.reason, exc.hint) from None

    @cached_property
    def default(self) -> str:
        """Name of the model for requests that don't name one; empty if such requests are refused."""
        names = self.served
        if self.default_model:
            return self.default_model
        return next(iter(names)) if len(names) == 1 else self.model if self.model in names else ""

    @cached_property
    def longest_request_s(self) -> float:
        return max(model.request_timeout_ms for model in self.served.values()) / 1000

    @cached_property
    def drain_s(self) -> float:
        """Seconds that a shutdown waits for requests in flight: at least as long as a request or batch may take."""
        longest_batch = max(run.gpu_timeout_ms for run in self.runs.values()) / 1000
        return max(self.least_drain_s, self.longest_request_s, longest_batch)

    @cached_property
    def longest_task_s(self) -> float:
        return max(model.task_timeout_ms for model in self.served.values()) / 1000


FIELDS: dict[str, Setting] = {  # In the order of the help.
    field.name: field.metadata["setting"] for field in dataclasses.fields(Settings) if "setting" in field.metadata
}
MODEL_FIELDS = tuple(name for name, field in FIELDS.items() if field.own is not Own.PROCESS)  # Each model may set them.
VERSION_FIELDS = tuple(name for name, field in FIELDS.items() if field.own is Own.VERSION)  # Each version may set them.

_KINDS: dict[str, type] = {
    name: next(t for t in (typing.get_args(hint) or (hint,)) if t is not type(None))
    for name, hint in typing.get_type_hints(Settings).items()
    if name in FIELDS
}


def kind(name: str) -> type:
    """Return the type of a setting: str, int, float or bool."""
    return _KINDS[name]


def flag(name: str) -> str:
    """Return the flag for a setting."""
    return f"--{name.replace('_', '-')}"


def idle(settings: Settings, *, versions: bool = False) -> list[tuple[str, str]]:
    """Return settings that were changed but have no effect, each with the setting that it needs. They are not errors, because
    processes in several roles may share a file. `versions` is True if the user named versions of a model."""
    owners = (settings, *settings.served.values())
    versions = versions or any(model.versions for model in settings.models)
    return [
        (name, field.needs)
        for name, field in FIELDS.items()
        if field.needs
        and getattr(settings, name) != field.default
        and not any(getattr(owner, field.needs) for owner in owners)
        and not (versions and name == "version_weights")
    ]


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse(settings: Settings, name: str, reason: str, hint: str) -> NoReturn:
    """Raise SettingError for the value of a setting."""
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
"""Id of a GPU as in CUDA_VISIBLE_DEVICES, or `cpu`."""


def _devices(settings: Settings) -> None:
    ids = settings.device_ids
    if not ids:
        return
    if not all(ids):
        refuse(settings, "devices", "has an empty id", "Name one id per worker, for example 0,1.")
    for id in ids:
        if not _DEVICE.fullmatch(id):
            hint = "Write a number or a UUID, as nvidia-smi -L lists them, such as 0, GPU-8932f937-… or MIG-…; or cpu."
            refuse(settings, "devices", f"{id!r} is not the id of a GPU", hint)
    fewer = settings.autoscale == LOCAL and settings.workers < len(ids)
    if len(ids) != settings.workers and not fewer:
        count = "1 device" if len(ids) == 1 else f"{len(ids)} devices"
        reason = f"names {count} for {settings.workers} workers (`workers`)"
        refuse(settings, "devices", reason, "Name one id per worker, or leave it out.")


def _versions(settings: Settings) -> None:
    for model in settings.models:
        for name, on in (("models_per_gpu", settings.models_per_gpu), ("autoscale", settings.autoscale == LOCAL)):
            if model.versions and on:
                run = f"{model.name}@{model.versions[0].name}"
                reason = f"does not work with several versions of a model in one process, such as {run}"
                hint = "Leave it out; or run each version in its own process over one broker, with `model_version`."
                refuse(settings, name, reason, hint)


def _min_warm(settings: Settings) -> None:
    room = settings.models_per_gpu * settings.workers
    if not room:
        return
    per_model = [int(dict(model.values).get("min_warm", settings.min_warm)) for model in settings.models]
    names = ["min_warm", *(f"models.{model.name}.min_warm" for model in settings.models)]
    for name, least in zip(names, [settings.min_warm, *per_model], strict=True):
        if least > settings.workers:
            reason = f"is more than there are GPUs ({settings.workers} by `workers`)"
            raise SettingError(name, least, reason, "A GPU loads a model only once; lower it, or raise `workers`.")
    if sum(per_model) > room or (sum(per_model) == room and 0 in per_model):
        reason = f"is too low: {settings.workers} GPUs hold {room} models, but `min_warm` keeps {sum(per_model)} of them loaded"
        refuse(settings, "models_per_gpu", reason, "Raise it or `workers`, or lower `min_warm`.")
    for model in settings.models:
        for name, value in model.values:
            if name in ("workers", "devices") and value != getattr(settings, name):
                reason = f"shares all GPUs among the models, but model {model.name} has its own {name}"
                refuse(settings, "models_per_gpu", reason, f"Leave out either {name} of its table, or this.")


def _times(settings: Settings) -> None:
    if settings.queue_timeout_ms > settings.request_timeout_ms:
        reason = f"is longer than `request_timeout_ms` ({settings.request_timeout_ms:g} ms)"
        refuse(settings, "queue_timeout_ms", reason, "Lower it, or raise `request_timeout_ms`.")
    if settings.max_wait_ms is not None and settings.max_wait_ms > settings.queue_timeout_ms:
        reason = f"is longer than `queue_timeout_ms` ({settings.queue_timeout_ms:g} ms)"
        refuse(settings, "max_wait_ms", reason, "Every request would expire before its batch leaves; lower it.")
    if policies.POLICIES[settings.policy].own_waits and settings.max_wait_ms is not None:
        reason = f"has no effect with `policy` {settings.policy}, which has its own waits"
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
        refuse(settings, "admin_port", "is also the public port (`port`)", "Choose another.")


def _grpc_port(settings: Settings) -> None:
    if settings.grpc_port and settings.grpc_port == settings.port:
        refuse(settings, "grpc_port", "is also the HTTP port (`port`)", "Choose another, for example 8081.")
    if settings.grpc_port and settings.grpc_port == settings.admin_port and settings.host == settings.admin_host:
        refuse(settings, "grpc_port", "is also the admin port (`admin_port`)", "Choose another, for example 8081.")


def _files(settings: Settings) -> None:
    if settings.keys == "ledger" and not settings.ledger:
        reason = "means the ledger's database, but `ledger` is not set"
        refuse(settings, "keys", reason, "Set `ledger`, or name a TOML file of keys.")
    for name, hint in (
        ("input_policy", "Name a TOML file of rules, or leave it out."),
        ("chat_template", "Name a file with a Jinja template, or plain."),
        ("jwt", "Name a TOML file of issuers, or leave it out."),
        ("remote_headers_file", "Name a file of header fields, or leave it out."),
    ):
        if (path := getattr(settings, name)) != FIELDS[name].default and not is_file(Path(path)):
            refuse(settings, name, "no such file", hint)
    for name, cert in (("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert"), ("remote_key", "remote_cert")):
        if getattr(settings, name) and not getattr(settings, cert):
            refuse(settings, name, f"has no effect without `{cert}`", "Also name a certificate, or leave this out.")


def _urls(settings: Settings) -> None:
    for name, fault_of in (("ledger", database_fault), ("broker", broker_fault)):
        if (url := getattr(settings, name)) and (fault := fault_of(url)):
            refuse(settings, name, *fault)


def _bulk(settings: Settings) -> None:
    if settings.bulk_dir and (settings.broker or "://" in settings.bulk_dir) and not settings.ledger:
        reason = "needs a database for jobs that all gateways share, but `ledger` is not set"
        refuse(settings, "bulk_dir", reason, "Set `ledger`, for example postgresql://USER:PASSWORD@HOST:5432/DATABASE.")


def _shed_depths(settings: Settings) -> None:
    depths = re.fullmatch(r"auto|([0-9]{1,8}),([0-9]{1,8})", settings.shed_depths)
    if depths is None:
        refuse(settings, "shed_depths", "is neither auto nor two numbers", "For example 100,500.")
    if depths[1] and not 1 <= int(depths[1]) <= int(depths[2]):
        refuse(settings, "shed_depths", "must be two numbers above 0, the lower one first", "For example 100,500.")


def _room(settings: Settings) -> None:
    # A tenant's half of the memory must hold a body with four bytes per character. A quarter must hold two received bodies.
    least = -(-8 * settings.max_body_bytes >> 20) + 1
    if settings.memory_mb < least:
        reason = f"is too little for a request of `max_body_bytes` ({settings.max_body_bytes} bytes)"
        refuse(settings, "memory_mb", reason, f"Use {least} or more, or lower `max_body_bytes`.")


def _tier_rates(settings: Settings) -> None:
    seen: set[str] = set()
    for part in filter(None, settings.tier_rates.split(",")):
        name, sign, rate = part.strip().partition("=")
        if not sign or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,3})?", rate) or float(rate) <= 0:
            reason = f"{part.strip()!r} is not TIER=REQUESTS, with requests per minute above 0"
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


def _scale_rules(settings: Settings) -> None:
    try:
        scale_rules_of.read(settings.scale_rules)
    except scale_rules_of.NoRules as exc:
        hint = 'For example [{"queue_above": 500, "for_s": 30, "add": 3}].'
        refuse(settings, "scale_rules", f"cannot be read: {exc}", hint)


def _scaling(settings: Settings) -> None:
    if settings.max_workers and settings.min_workers > settings.max_workers:
        reason = f"is more than `max_workers` ({settings.max_workers})"
        refuse(settings, "min_workers", reason, "Lower it, or raise `max_workers`.")
    if settings.min_workers and settings.scale_to_zero_after_s:
        reason = f"needs `min_workers` 0, but it is {settings.min_workers}"
        refuse(settings, "scale_to_zero_after_s", reason, "Set `min_workers` to 0, or leave this out.")
    if settings.scale_to_zero_after_s and settings.models_per_gpu:
        reason = "has no effect with `models_per_gpu`, because idle models already make room for others"
        refuse(settings, "scale_to_zero_after_s", reason, "Leave one of them out.")
    if settings.autoscale == LOCAL and settings.models_per_gpu:
        reason = "scales the workers of each model, but with `models_per_gpu` all models share the workers"
        refuse(settings, "autoscale", reason, "Leave one of them out.")


def is_file(path: Path) -> bool:
    """Return True if there is a file at this path that this process can access."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises if the name is too long, or the folder inaccessible


CHECKS: tuple[Callable[[Settings], None], ...] = (
    _tiers, _devices, _versions, _min_warm, _times, _admin, _grpc_port, _files, _urls, _bulk, _shed_depths, _room, _tier_rates,
    _version_weights, _scale_rules, _scaling,
)  # fmt: skip
