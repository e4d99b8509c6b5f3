"""Packages beyond the ones that every installation has: which job needs which, and how to install them.

A hint names the packages and not the extra `headway[…]`: that name works only with a checkout or a wheel at hand, and a package
index would look for a project of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from headway.errors import SettingError

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "redis": ("redis>=8.1,<9", "hiredis>=3.5,<4"),
    "postgres": ("asyncpg>=0.31,<0.33",),
    "jwt": ("PyJWT[crypto]>=2.13,<3",),
    "grpc": ("grpcio>=1.80,<2", "hpack>=4.1,<5", "protobuf>=6.33,<8"),
    "otel": (
        "opentelemetry-exporter-otlp-proto-grpc>=1.45,<2",
        "opentelemetry-exporter-otlp-proto-http>=1.45,<2",
        "opentelemetry-sdk>=1.45,<2",
    ),
    "chat": ("jinja2>=3.1.6,<4",),
    "policy": ("google-re2>=1.1.20251105,<2",),
    "bucket": ("fsspec>=2026.3", "s3fs>=2026.3"),
    "gpu": ("nvidia-ml-py>=12.575,<14",),
    "plot": ("matplotlib>=3.11,<4",),
}
"""Requirements by the name of their extra, as in pyproject.toml."""


MODULES: Mapping[str, tuple[str, ...]] = {
    "redis": ("redis",),
    "postgres": ("asyncpg",),
    "jwt": ("jwt", "cryptography"),
    "grpc": ("grpc", "google", "hpack"),
    "otel": ("opentelemetry", "grpc", "google", "requests"),
    "policy": ("re2",),
    "bucket": ("fsspec",),
}
"""Modules that whoever needs an extra imports, by its name."""


def install_hint(extra: str) -> str:
    """Say how to install what `extra` brings, wherever Headway itself came from."""
    packages = " ".join(f"'{package}'" for package in PACKAGES[extra])
    return f"Run pip install {packages}."


@contextlib.contextmanager
def needing(extra: str, setting: str, value: object, reason: str) -> Iterator[None]:
    """Import what needs the packages of an extra, as only installations with that setting have them.

    Arguments:
        extra: name of the extra.
        setting: name of the setting that asks for it.
        value: its value, as it may be shown.
        reason: words on what is missing.

    Raises:
        SettingError: a package is missing.
    """
    try:
        yield
    except ImportError as exc:
        # A package that is there and lacks a name is broken; gRPC's says so of what it needs itself.
        if (exc.name or "").partition(".")[0] not in MODULES[extra] or (type(exc) is ImportError and extra != "grpc"):
            raise
        raise SettingError(setting, value, reason, install_hint(extra)) from exc
