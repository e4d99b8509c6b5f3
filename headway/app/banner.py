"""The banner printed at startup: role, addresses and rules of the process, and a command to try it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.app.backends import BACKENDS, worker_name
from headway.app.devices import CPU, NO_DEVICES, Devices
from headway.app.roles import ROLES, Parts
from headway.config import CHARS, Settings, fallback_batches, fallbacks_of, shown_url
from headway.config.settings import LOCAL
from headway.config.target import Target, shown_target
from headway.core.policies import POLICIES
from headway.core.tensors import BYTES
from headway.core.values import as_json
from headway.model import Role, Signature, TensorSpec, ValueKind

Model = tuple[Settings, Target, Devices]

READY = "Ready."  # Last line of the banner if the process has no clients.
ENOUGH = 256  # File descriptors that a gateway needs for workers, files and outgoing connections, but not for clients.
MOST_SHOWN = 16
_LONGEST_EXAMPLE = 200


def banner(
    settings: Settings,
    role: Role,
    target: Target | None,
    port: int,
    admin_port: int,
    devices: Devices = NO_DEVICES,
    items_per_second: float = 0.0,
    signature: Signature | None = None,
    models: Sequence[Model] = (),
    descriptors: int | None = None,
) -> str:
    """Return the text of the banner. `port` is 0 if there is no public port. `items_per_second` comes from warm-up batches.
    `models` is empty unless there are several, and `signature` is that of the first model. `descriptors` is the limit on
    file descriptors."""

    def lines() -> Iterator[str]:
        parts = ROLES[role]
        yield _headline(parts, settings, target, models)
        if parts.gateway:
            yield from _doors(settings, port)
        admin = f"{settings.scheme}://{_host(settings.admin_host)}:{admin_port}"
        yield f"  admin    {admin}/dashboard   health /internal/health   metrics /metrics"
        if descriptors is not None:
            yield f"  files    {descriptors} descriptors{_connections(settings, descriptors) if parts.gateway else ''}"
        if settings.tls_cert:
            authority = settings.tls_client_ca
            shown = f"must show a certificate of {authority}" if authority else "need no certificate"
            yield f"  tls      {settings.tls_cert}; clients {shown}"
        if settings.broker:
            shards = "" if settings.shards == 1 else f" in {settings.shards} shards"
            yield f"  broker   {settings.broker_shown}   keys {settings.broker_prefix}:…{shards}"
        if target is not None:
            yield f"  batches  up to {settings.max_batch_size}{_weight(settings)}, policy {settings.policy}{_wait(settings)}; {_slots(settings, target)}"
            if devices.ids:
                yield f"  devices  {_devices(settings, target, devices)}"
            if items_per_second:
                yield f"  capacity about {_rounded(items_per_second):,} inputs/s, estimated from warm-up batches"
        if models and settings.models_per_gpu:
            yield f"  gpus     {settings.workers}, each holds up to {settings.models_per_gpu} of the models, loaded on demand"
        for own, served, placed in models:
            yield f"  model    {own.model}, version {own.model_version}: {served}"
            on = f" on {_devices(own, served, placed)}" if placed.ids else ""
            where = "" if settings.models_per_gpu and placed.ids else f"; {_slots(own, served)}{on}"
            yield f"           up to {own.max_batch_size}{_weight(own)}, policy {own.policy}{_wait(own)}{where}"
        if parts.gateway:
            yield from _rules(settings, target)
            yield "Try it:"
            named = "" if settings.default or len(settings.served) < 2 else next(iter(settings.served))
            yield f"  {_line_to_try(settings, port, signature, named)}"
            return
        if parts.batchers:
            yield f"  limits   a batch {settings.gpu_timeout_ms:g} ms; a lease lasts {settings.lease_s:g} s"
        if parts.controller:
            yield f"  throttle the lowest tier gets what the others leave of {settings.target_utilisation:.0%} of the capacity"
        yield READY

    return "\n".join(lines())


def _doors(settings: Settings, port: int) -> Iterator[str]:
    url = f"{settings.scheme}://{_host(settings.host)}:{port}"
    yield f"  public   {url}   docs {url}/docs"
    yield f"  openai   base URL {url}/v1: completions, chat, embeddings, models"
    yield f"  oip      {url}/v2: Open Inference Protocol, version 2"
    if settings.grpc_port:
        yield f"  grpc     {_host(settings.host)}:{settings.grpc_port}   headway.v1, Open Inference Protocol, health, reflection"


def _connections(settings: Settings, descriptors: int) -> str:
    limit = settings.max_connections
    if descriptors >= limit + ENOUGH:
        return f", enough for {limit} connections (--max-connections)"
    needed = f"which need {limit + ENOUGH}: raise the hard limit, for example with ulimit -Hn or LimitNOFILE="
    return f", too few for {limit} connections (--max-connections), {needed}"


def _rules(settings: Settings, target: Target | None) -> Iterator[str]:
    run = f"a batch {settings.gpu_timeout_ms:g} ms, " if target is not None else ""
    yield (
        f"  limits   queue {settings.queue_timeout_ms:g} ms, {run}in all {settings.request_timeout_ms:g} ms; "
        f"body {settings.max_body_bytes} bytes"
    )
    if settings.input_policy:
        yield f"  inputs   go through the policy in {settings.input_policy}"
    if settings.ledger:
        yield f"  ledger   {_ledger(settings.ledger)}"
    if settings.bulk_dir:
        yield f"  bulk     jobs and their files in {settings.bulk_dir}"
    yield f"  tiers    {' > '.join(settings.tier_names)}; {_who(settings)}"
    if settings.keys or settings.jwt:
        yield f"  rates    {_rates(settings)}"
    if settings.broker:
        yield from (f"  fallback {line}" for line in _fallbacks(settings))


def _ledger(url: str) -> str:
    sqlite, path = url.split("///", 1) if url.startswith("sqlite:") else ("", "")
    return str(Path(path).absolute()) if sqlite else shown_url(url)


def _headline(parts: Parts, settings: Settings, target: Target | None, models: Sequence[Model]) -> str:
    names = list(settings.served)
    model = f"model {names[0]!r}" if len(names) == 1 else f"{len(names)} models"
    if models:
        return f"Headway serves {model}" if parts.gateway else f"Headway worker {settings.name} runs {model}"
    return parts.headline.format(name=settings.name, target=target, model=model)


def _weight(settings: Settings) -> str:
    unit = "characters" if settings.weight == CHARS else settings.weight
    return f" and {settings.max_batch_weight} {unit}" if settings.max_batch_weight else ""


def _rounded(number: float) -> int:
    return int(round(number, 1 - math.floor(math.log10(number)))) if number >= 10.0 else math.ceil(number)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the loopback address for each wildcard


def _near(settings: Settings) -> str:
    if settings.host not in EVERYWHERE:
        return _host(settings.host)
    # Certificates usually name hosts, not addresses.
    return "localhost" if settings.tls_cert else _host(EVERYWHERE[settings.host])


def _certificates(settings: Settings) -> str:
    if not settings.tls_cert:
        return ""
    shown = "--cert YOUR_CERT --key YOUR_KEY_FILE " if settings.tls_client_ca else ""
    return f"--cacert AUTHORITY {shown}"


def _wait(settings: Settings) -> str:
    if settings.max_wait_ms is None:
        return ""
    milliseconds = f"{settings.max_wait_ms:g} ms"
    aims = POLICIES[settings.policy].aims
    return f", aiming at {milliseconds} of waiting" if aims else f", at most {milliseconds} for batch-mates"


def _slots(settings: Settings, target: Target) -> str:
    singular, plural = BACKENDS[type(target)].words
    slots = f"{settings.workers} {singular if settings.workers == 1 else plural}"
    if settings.autoscale != LOCAL:
        return slots
    least, most = settings.min_workers, settings.max_workers
    bounds = f"{least} to {most}" if most else f"{least} or more"
    by = "the controller's policy" if settings.broker else f"policy {settings.scale_policy}"
    return f"{slots} at first, {bounds} by {by} (--autoscale {LOCAL})"


def _devices(settings: Settings, target: Target, devices: Devices) -> str:
    if all(devices.of(index) == CPU for index in range(settings.workers)):
        return "CPU"
    shown = [
        f"{worker_name(settings, target, devices, index).rpartition('/')[2]}: {devices.shown(index)}"
        for index in range(min(settings.workers, MOST_SHOWN))
    ]
    more = settings.workers - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _rates(settings: Settings) -> str:
    if not settings.user_rate:
        return "no limit for users, only for keys with a rate of their own"
    return f"{settings.user_rate:g} requests/min for each user whose key has no rate of its own (--user-rate)"


def _who(settings: Settings) -> str:
    keys = f"keys from {settings.keys}" if settings.keys else ""
    tokens = f"tokens of {settings.jwt}" if settings.jwt else ""
    return " and ".join(filter(None, (keys, tokens))) or f"no keys: everybody is {settings.default_tier}"


def _line_to_try(settings: Settings, port: int, signature: Signature | None, model: str) -> str:
    """Return a shell command that sends the target's example or, if that is long, another input that the target accepts.
    For tensors without a short example, a Python program prints a row of zeros to send. If the shape is unknown, the
    command reads the model's metadata instead. `model` is empty if requests needn't name a model."""
    curl = f"curl {_certificates(settings)}{settings.scheme}://{_near(settings)}:{port}"
    named = f'"model": "{model}", ' if model else ""
    text = _example(signature)
    if text is not None or signature is None:
        body = shlex.quote(f'{{{named}"input": {text}}}')
        return f"{curl}/v1/inference{_credential(settings)} -d {body}"
    if not signature.inputs:
        return f"{curl}/v2/models/{model or settings.default}{_credential(settings)}"
    program = f'import json; print(json.dumps({{{named}"input": {_zeros(signature.inputs)}}}))'
    return f"python3 -c {shlex.quote(program)} | {curl}/v1/inference{_credential(settings)} -d @-"


def _example(signature: Signature | None) -> str | None:
    """Return an example input as JSON, or None if the target takes tensors and has no short example."""
    if signature is None:
        return '"hello"'
    if signature.example is not None and len(signature.example) <= _LONGEST_EXAMPLE:
        return as_json(signature.example).decode()
    return {ValueKind.BYTES: '"aGVsbG8="', ValueKind.TENSORS: None}.get(signature.takes, '"hello"')


def _zeros(specs: Sequence[TensorSpec]) -> str:
    rows = []
    for spec in specs:
        row = {"BOOL": "False", BYTES: '"hello"'}.get(spec.datatype, "0")
        for size in reversed(spec.shape):
            row = f"[{row}]" if size in (1, -1) else f"[{row}] * {size}"
        rows.append(row)
    if len(rows) == 1:
        return rows[0]
    named = [f"{as_json(spec.name).decode()}: {row}" for spec, row in zip(specs, rows, strict=True)]
    return f"{{{', '.join(named)}}}"


def _credential(settings: Settings) -> str:
    if not (settings.keys or settings.jwt):
        return ""
    return f" -H 'Authorization: Bearer {'YOUR_KEY' if settings.keys else 'YOUR_TOKEN'}'"


def _fallbacks(settings: Settings) -> Iterator[str]:
    fallbacks = fallbacks_of(settings)
    for model, own in fallbacks.items():
        limit = fallback_batches(own.fallback)
        batches = "1 batch" if limit == 1 else f"{limit} batches"
        whose = f" for model {model!r}" if len(settings.served) > 1 else ""
        yield f"{shown_target(own.fallback)}, {batches} at a time,{whose} while the broker is unavailable"
    if len(fallbacks) < len(settings.served):
        others = "requests for other models" if fallbacks else "requests"
        yield f"none: while the broker is unavailable, {others} get 503"
