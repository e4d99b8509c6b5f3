"""Issuers whose tokens are accepted. They are read from a TOML file, which docs/security.md describes.

If two issuers could name the same tenant, each could impersonate the other's users. So unless both set `shared_tenants = true`,
each must have its own tenant, or a tenant prefix that another issuer's tenants can't start with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headway.config import shown_url
from headway.errors import SettingError
from headway.identity.tables import MOST_NAME, is_name, read_tables

ALGORITHMS = ("RS256", "ES256", "EdDSA")
MAX_LEEWAY = 300.0


class Issuer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Issuer of tokens, and the names of its claims. docs/security.md describes the attributes."""

    issuer: str
    audience: str
    jwks: str
    algorithm: str
    leeway_s: float = 30.0
    user_claim: str = "sub"
    tenant: str | None = None
    tenant_claim: str = "tenant"
    tenant_prefix: str = ""
    shared_tenants: bool = False
    tier_claim: str = "tier"
    default_tier: str | None = None
    models_claim: str | None = None
    model_limits_claim: str | None = None

    @property
    def remote(self) -> bool:
        return "://" in self.jwks

    @property
    def exposed(self) -> bool:
        """True if the keys are fetched over a network without TLS, where they could be replaced in transit."""
        url = urlsplit(self.jwks) if self.remote else None
        return url is not None and url.scheme == "http" and url.hostname not in ("localhost", "127.0.0.1", "::1")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    issuers: list[dict[str, object]]


def read_issuers(path: Path, tiers: Sequence[str]) -> list[Issuer]:
    """Read the issuers in a file. Raises SettingError if the file can't be read, or an issuer is invalid."""
    rows = read_tables(path, "jwt", _File, "issuers", "Specify a readable file.")
    if not rows:
        raise SettingError("jwt", str(path), "contains no issuers", "Write every issuer as a table [[issuers]].")
    issuers: list[Issuer] = []
    for position, row in enumerate(rows, start=1):
        where = f"{path}: issuers[{position}]"
        issuer = _checked(where, row, tiers)
        for other, known in enumerate(issuers, start=1):
            if known.issuer == issuer.issuer:
                reason = f"is also the name of issuers[{other}]"
                raise SettingError(f"{where}.issuer", issuer.issuer, reason, "Remove one of them.")
        if not issuer.remote:
            issuer = msgspec.structs.replace(issuer, jwks=str(path.parent / issuer.jwks))
        issuers.append(issuer)
    for (first, issuer), (second, other_issuer) in itertools.combinations(enumerate(issuers, start=1), 2):
        if _may_meet(issuer, other_issuer) and not (issuer.shared_tenants and other_issuer.shared_tenants):
            field = "tenant_prefix" if other_issuer.tenant is None else "tenant"
            raise SettingError(
                f"{path}: issuers[{second}].{field}",
                getattr(other_issuer, field),
                f"overlaps with the tenants of issuers[{first}]",
                "Give each issuer its own tenant, or a tenant_prefix that no other issuer's tenants start with; "
                "or write shared_tenants = true in both if they should share tenants.",
            )
    return issuers


def _checked(where: str, row: dict[str, object], tiers: Sequence[str]) -> Issuer:
    try:
        issuer = msgspec.convert(row, Issuer)
    except msgspec.ValidationError as exc:
        hint = f"An issuer has {', '.join(Issuer.__struct_fields__)}."
        raise SettingError(where, row.get("issuer", "…"), str(exc), hint) from None
    if issuer.algorithm not in ALGORITHMS:
        hint = f"Use {' or '.join(ALGORITHMS)}, whichever the issuer signs with."
        raise SettingError(f"{where}.algorithm", issuer.algorithm, "is not supported", hint)
    if not 0 <= issuer.leeway_s <= MAX_LEEWAY:
        hint = "Choose a value in that range."
        raise SettingError(f"{where}.leeway_s", issuer.leeway_s, f"must lie between 0 and {MAX_LEEWAY:g}", hint)
    for name in (
        "issuer", "audience", "user_claim", "tenant", "tenant_claim", "tier_claim", "models_claim", "model_limits_claim",
    ):  # fmt: skip
        text = getattr(issuer, name)
        if text is not None and not is_name(text):
            hint = "Write it as the issuer does."
            raise SettingError(f"{where}.{name}", text, f"must be 1 to {MOST_NAME} printable characters", hint)
    if len(issuer.tenant_prefix) > MOST_NAME // 2 or not issuer.tenant_prefix.isprintable():
        reason, hint = f"must be at most {MOST_NAME // 2} printable characters", "Choose a shorter one."
        raise SettingError(f"{where}.tenant_prefix", issuer.tenant_prefix, reason, hint)
    if issuer.tenant is not None and (issuer.tenant_prefix or "tenant_claim" in row):
        reason, hint = "excludes tenant_claim and tenant_prefix", "Remove either it or those."
        raise SettingError(f"{where}.tenant", issuer.tenant, reason, hint)
    if issuer.default_tier is not None and issuer.default_tier not in tiers:
        raise SettingError(f"{where}.default_tier", issuer.default_tier, "is not a tier", f"Use {' or '.join(tiers)}.")
    _check_source(where, issuer)
    return issuer


def _check_source(where: str, issuer: Issuer) -> None:
    hint = "Write an http or https URL without a password in it, or the path of a file."
    if not issuer.jwks.strip() or "\0" in issuer.jwks:
        raise SettingError(f"{where}.jwks", issuer.jwks, "is empty or contains a NUL", hint)
    if not issuer.remote:
        return
    try:
        url = urlsplit(issuer.jwks)
        valid = url.scheme in ("http", "https") and url.hostname and "@" not in url.netloc and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SettingError(f"{where}.jwks", shown_url(issuer.jwks), "is not a URL from which keys can be fetched", hint)


def _may_meet(issuer: Issuer, other: Issuer) -> bool:
    if issuer.tenant is not None and other.tenant is not None:
        return issuer.tenant == other.tenant
    if issuer.tenant is not None:
        return issuer.tenant.startswith(other.tenant_prefix)
    if other.tenant is not None:
        return other.tenant.startswith(issuer.tenant_prefix)
    return issuer.tenant_prefix.startswith(other.tenant_prefix) or other.tenant_prefix.startswith(issuer.tenant_prefix)
