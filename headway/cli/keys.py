"""`headway keys`: create, list, revoke and rotate API keys."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import msgspec

from headway.cli.admin import as_json, pretty, table
from headway.cli.commands import CommandGroup, option
from headway.cli.flags import with_settings
from headway.config import Settings
from headway.errors import HeadwayError, SettingError, StoreUnavailable
from headway.identity.api_keys.credential import LIVE, NOISE, SERVICE, digest, generate, is_id, parse
from headway.identity.tables import check_model_limit
from headway.model import ApiKey, ModelLimit
from headway.ports import KeyStore

_T = TypeVar("_T")

_PLACE = ("keys", "ledger")
_REMOVED = 10_000  # Maximum number of expired keys that one command removes, since services may lack write access.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGEST = 36_500 * 86_400.0
_MOST_LIVE = 2
_REVOKED = 0.0  # Expiry of a revoked key in Unix time. It makes the key invalid by any host's clock.

_key_id = click.argument("id", metavar="ID", help="Id of the key, from headway keys list.")
_expires = option("--expires", default="", metavar="DURATION", help="How long the new key is valid: 90d, 12h, 30m or 45s.")  # fmt: skip


@click.group(cls=CommandGroup)
def keys() -> None:
    """Create, list, revoke and rotate API keys. They are stored in a file (--keys) or in the ledger's database (--ledger)."""


class KeysError(HeadwayError):
    """A key cannot be changed as requested."""


@keys.command()
@option("--user", default="", metavar="TEXT", help="User of the key, unique within the tenant.")
@option("--tenant", default="", metavar="TEXT", help="Tenant of the user, such as the company that pays.")
@option("--tier", default="", metavar="TEXT", help="Tier of the key's requests.")
@option("--rate", default="", metavar="RATE",
    help="Rate limit of this key: 1000/min or 20/s; 0: no limit. Default: the key shares the limit of its user.")  # fmt: skip
@option("--burst", default="", metavar="N",
    help="Maximum number of requests at once. Default: as many as the rate allows in ten seconds.")  # fmt: skip
@option("--models", default="", metavar="A,B", help="Models that the key may use. Default: all.")
@option("--model-rate", "model_rates", multiple=True, metavar="MODEL=RATE",
    help="Rate limit of this key for one model, such as big=60/min. Its requests also count towards --rate. Repeatable.")  # fmt: skip
@option("--model-burst", "model_bursts", multiple=True, metavar="MODEL=N",
    help="Maximum number of requests at once for one model. Default: as many as its rate allows in ten seconds. Repeatable.")  # fmt: skip
@_expires
@option("--service", is_flag=True, help="Make a service token for HEADWAY_ADMIN_TOKEN. Headway does not store it.")
@with_settings((*_PLACE, "tiers", "default_tier"))
def create(settings: Settings, service: bool, **given: Any) -> None:
    """Create a key and print it. Headway stores only its digest, so it cannot be shown again.

    headway keys create --user alice --tenant acme --tier paid --expires 90d --keys keys.toml
    """
    if service:
        if any(given.values()):
            raise click.BadParameter("a service token has no attributes; give --service alone")
        _hand_out(generate(SERVICE, os.urandom(NOISE)), "Set HEADWAY_ADMIN_TOKEN to this token where the service runs.")
        return
    missing = [f"--{name}" for name in ("user", "tenant", "tier") if not given[name]]
    if missing:
        tiers = f"The tiers are {', '.join(settings.tier_names)}. " if not given["tier"] else ""
        hint = f"{tiers}Or give --service alone to make a service token."
        raise SettingError(", ".join(missing), "", "must be given", hint)
    if given["tier"] not in settings.tier_names:
        raise SettingError("--tier", given["tier"], "is not a tier", f"Use {' or '.join(settings.tier_names)}.")
    text, key = _fresh(_new_key(given))
    _with(settings, _changing(lambda store: store.add(key)), create=True)
    _hand_out(text, f"Stored in {_place(settings)}. Running gateways accept the key within about two seconds.")


def _new_key(given: Mapping[str, Any]) -> ApiKey:
    now, rate, expires, models = time.time(), given["rate"], given["expires"], given["models"]
    only = tuple(_name("--models", part.strip()) for part in models.split(",")) if models else ()
    return ApiKey(
        id="",
        digest=b"",
        user=_name("--user", given["user"]),
        tenant=_name("--tenant", given["tenant"]),
        tier=given["tier"],
        models=only,
        rate=_rate(rate) if rate else None,
        burst=_burst(given["burst"], rate),
        created_at=now,
        expires_at=now + duration("--expires", expires, least=1.0) if expires else None,
        model_limits=_model_limits(given["model_rates"], given["model_bursts"], only),
    )


@keys.command("list")
@as_json
@with_settings((*_PLACE, "user_rate"))
def list_keys(settings: Settings, json: bool) -> None:
    """List all keys, oldest first, including expired ones. Secrets are not stored, so they are not shown.

    A key without its own rate shares the rate of its user. The list shows the --user-rate that is set here, which may differ from
    the service's.
    """
    now = time.time()
    rows = [_shown(key, now) for key in _with(settings, lambda store: store.keys())]
    if json:
        click.echo(pretty({"keys": rows}))
    elif not rows:
        click.echo("no keys")
    else:
        head = ["ID", "USER", "TENANT", "TIER", "RATE", "BURST", "MODELS", "CREATED", "EXPIRES", "STATE", "REPLACES"]
        head += ["MODEL LIMITS"] if any(row["model_limits"] for row in rows) else []
        for row in rows:
            row["rate"] = _rate_text(row["rate"], settings.user_rate)
        click.echo(table(tuple(head), [tuple(map(_cell, row.values()))[: len(head)] for row in rows]))


@keys.command()
@_key_id
@with_settings(_PLACE)
def revoke(settings: Settings, id: str) -> None:
    """Revoke a key immediately. Running services refuse it within 5 s."""
    key_id = _id(id)
    now = time.time()

    async def end(store: KeyStore) -> ApiKey:
        key = await _existing(store, key_id)
        await store.expire(key_id, _REVOKED)
        return key

    key = _with(settings, _changing(end))
    ended = not _live(key, now)
    click.echo(f"{key_id} had ended already" if ended else f"{key_id} revoked: {key.user} of {key.tenant}")


@keys.command()
@_key_id
@option("--grace", default="24h", metavar="DURATION", help="How long the old key remains valid.")
@_expires
@with_settings(_PLACE)
def rotate(settings: Settings, id: str, grace: str, expires: str) -> None:
    """Create and print a key that replaces another and has the same rights. The old key expires after --grace.

    The new key is valid for as long as the old key originally was, unless you give --expires.
    """
    key_id = _id(id)
    now = time.time()
    overlap = duration("--grace", grace, least=0.0)
    until = now + overlap if overlap else _REVOKED
    lifetime = duration("--expires", expires, least=1.0) if expires else None

    async def replace(store: KeyStore) -> None:
        old = await _existing(store, key_id)
        everything = await store.keys()
        _check_rotation(old, everything, now)
        before = next((key.id for key in reversed(everything) if key.replaces == old.id), "")
        if lifetime is None and old.expires_at is not None and before:
            reason = f"{old.id} was replaced by {before} and ends at {_instant(old.expires_at)}"
            raise KeysError(f"{reason}; give --expires for the lifetime of the new key")
        span = lifetime if lifetime or old.expires_at is None else old.expires_at - old.created_at
        end = None if span is None else now + span
        text, new = _fresh(msgspec.structs.replace(old, created_at=now, expires_at=end, replaces=old.id))
        try:
            await store.add(new)
        except ValueError as exc:  # Another rotation was faster.
            raise KeysError(str(exc)) from None
        # Print the new key before ending the old one, so that it isn't lost if that fails.
        ends = until if old.expires_at is None else min(until, old.expires_at)
        when = f"at {_instant(ends)}" if ends else "immediately"
        _hand_out(text, f"Stored in {_place(settings)}. The key replaces {old.id}, which expires {when}.")
        await store.expire(old.id, until)

    _with(settings, _changing(replace))


def duration(flag: str, text: str, least: float) -> float:
    """Convert a duration such as `90d`, `12h`, `30m` or `45s` to seconds. Raises SettingError if it is malformed or out of range."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if seconds < 0:
        raise SettingError(flag, text, "is not a duration", "For example 90d, 12h, 30m or 45s.")
    if not least <= seconds <= _LONGEST:
        raise SettingError(flag, text, "must lie between 1s and 36500d" if least else "is too long", "Choose another.")
    return seconds


def _model_limits(rates: Sequence[str], bursts: Sequence[str], models: Sequence[str]) -> tuple[ModelLimit, ...]:
    rate_of, burst_of = _by_model("--model-rate", rates, "60/min"), _by_model("--model-burst", bursts, "5")
    for model, text in burst_of.items():
        if model not in rate_of:
            reason = "has no effect without a rate for this model"
            raise SettingError("--model-burst", f"{model}={text}", reason, f"Also give --model-rate {model}=60/min.")
    limits = []
    for model, text in rate_of.items():
        rate = _rate(text, "--model-rate", f"{model}={text}")
        burst_text = burst_of.get(model, "")
        burst = _burst(burst_text, text, "--model-burst", f"{model}={burst_text}")
        limit = ModelLimit(model, rate, burst)
        limits.append(check_model_limit("--model-rate", limit, models))
    return tuple(limits)


def _by_model(flag: str, given: Sequence[str], example: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in given:
        model, _, value = text.rpartition("=")
        if not model or not value:
            raise SettingError(flag, text, "lacks a model or a value", f"For example {flag} big={example}.")
        if model in values:
            raise SettingError(flag, text, f"is a second value for the model {model}", "Give one value.")
        values[model] = value
    return values


def _rate(text: str, flag: str = "--rate", typed: str = "") -> float:
    """Convert a rate such as `1000`, `1000/min` or `20/s` to requests per minute. Errors quote `typed` or, if empty, `text`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(/min|/s)?", text)
    rate = float(match[1]) * (60.0 if match[2] == "/s" else 1.0) if match else -1.0
    if not 0 <= rate <= 1e9:
        raise SettingError(flag, typed or text, "is not a rate", "For example 1000/min or 20/s; 0 for no limit.")
    return rate


def _burst(text: str, rate: str, flag: str = "--burst", typed: str = "") -> float | None:
    """Convert a burst to a number, or an empty string to None. Errors quote `typed` or, if it is empty, `text`."""
    if not text:
        return None
    if not rate:
        reason = "has no effect without a rate for this key"
        raise SettingError(flag, typed or text, reason, "Also give --rate, or leave this out.")
    if not _rate(rate):
        reason = "has no effect with a rate of 0, which means no limit"
        raise SettingError(flag, typed or text, reason, "Give a rate above 0, or leave this out.")
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise SettingError(flag, typed or text, "is not a whole number above 0", "For example 50.")
    return float(text)


def _name(flag: str, text: str) -> str:
    if not text or len(text) > 128 or not text.isprintable():
        raise SettingError(flag, text, "must be 1 to 128 printable characters", "Choose a name.")
    return text


def _id(text: str) -> str:
    """Return the id in `text`, which is an id or a complete key."""
    parsed = parse(text.encode(errors="replace"))
    id = parsed[0] if parsed else text.removeprefix(LIVE.decode())
    if not is_id(id):  # The text is not shown, because it may be part of a secret.
        hint = "headway keys list shows the ids: 12 letters and digits."
        raise SettingError("ID", "…", "is not the id of a key", hint)
    return id


async def _existing(store: KeyStore, id: str) -> ApiKey:
    key = await store.get(id)
    if key is None:
        raise KeysError(f"there is no key with the id {id}; headway keys list shows all")
    return key


def _check_rotation(old: ApiKey, all_keys: Sequence[ApiKey], now: float) -> None:
    """Raise KeysError if `old` isn't live, or if another key in its chain of replacements is still live."""
    if not _live(old, now):
        raise KeysError(f"{old.id} is {_state(old, now)}; make another with headway keys create")
    family = {old.id}
    while relatives := {
        end
        for key in all_keys
        for here, end in ((key.id, key.replaces), (key.replaces, key.id))
        if key.replaces and here in family and end not in family
    }:
        family |= relatives
    live = [key.id for key in all_keys if key.id in family and _live(key, now)]
    if len(live) >= _MOST_LIVE:
        raise KeysError(
            f"{' and '.join(live)} are both live, and no more may be; wait until one expires, or revoke one"
        )


def _state(key: ApiKey, now: float) -> str:
    if _live(key, now):
        return "live"
    return "revoked" if key.expires_at == _REVOKED else "ended"


def _live(key: ApiKey, now: float) -> bool:
    return key.expires_at is None or key.expires_at > now


def _fresh(attributes: ApiKey) -> tuple[str, ApiKey]:
    text = generate(LIVE, os.urandom(NOISE))
    parsed = parse(text.encode())
    assert parsed is not None  # noqa: S101 - it was made just now; for the type checker
    return text, msgspec.structs.replace(attributes, id=parsed[0], digest=digest(parsed[1]))


def _hand_out(text: str, note: str) -> None:
    click.echo(text)
    click.echo(f"{note} It cannot be shown again.", err=True)


def _shown(key: ApiKey, now: float) -> dict[str, Any]:
    return {
        "id": key.id,
        "user": key.user,
        "tenant": key.tenant,
        "tier": key.tier,
        "rate": key.rate,
        "burst": key.burst,
        "models": list(key.models),
        "created_at": _instant(key.created_at),
        "expires_at": _instant(key.expires_at) if key.expires_at else None,
        "state": _state(key, now),
        "replaces": key.replaces or None,
        "model_limits": {limit.model: {"rate": limit.rate, "burst": limit.burst} for limit in key.model_limits},
    }


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _limit_text(limit: dict[str, float | None]) -> str:
    burst = limit["burst"]
    return f"{limit['rate']:g}" if burst is None else f"{limit['rate']:g} (burst {burst:g})"


def _rate_text(rate: float | None, user_rate: float) -> str:
    text = f"{user_rate if rate is None else rate:g}"
    return f"{'no limit' if text == '0' else text}{' (user)' if rate is None else ''}"


def _cell(value: object) -> str:
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, dict):
        return ",".join(f"{model}={_limit_text(limit)}" for model, limit in value.items())
    if isinstance(value, list):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _place(settings: Settings) -> str:
    return settings.keys if settings.keys not in ("", "ledger") else "the ledger's database"


def _changing(work: Callable[[KeyStore], Awaitable[_T]]) -> Callable[[KeyStore], Coroutine[Any, Any, _T]]:
    """Return a function that runs `work`, then tries to remove keys that expired long ago."""

    async def both(store: KeyStore) -> _T:
        result = await work(store)
        with contextlib.suppress(StoreUnavailable):
            await store.remove_ended(time.time() - Settings.keys_retention_s, _REMOVED)
        return result

    return both


def _with(settings: Settings, work: Callable[[KeyStore], Awaitable[_T]], *, create: bool = False) -> _T:
    import asyncio

    from headway.app import stores

    store = stores.make_key_store(settings, create=create)

    async def run() -> _T:
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
