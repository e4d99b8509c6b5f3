"""Optional packages, the modules that they provide, and hints on how to install them. Hints name the packages, not the
extra `headway[…]`, which works only with a checkout or a wheel: on a package index, the name headway may belong to another
project."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from headway.errors import SettingError

PACKAGES: Mapping[str, tuple[str, ...]] = {  # Requirements of each extra, as in pyproject.toml.
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
MODULES: Mapping[str, tuple[str, ...]] = {  # Top-level modules that code for each extra imports.
    "redis": ("redis",),
    "postgres": ("asyncpg",),
    "jwt": ("jwt", "cryptography"),
    "grpc": ("grpc", "google", "hpack"),
    "otel": ("opentelemetry", "grpc", "google", "requests"),
    "policy": ("re2",),
    "bucket": ("fsspec",),
}


def install_hint(extra: str) -> str:
    """Return a hint on how to install an extra's packages."""
    packages = " ".join(f"'{package}'" for package in PACKAGES[extra])
    return f"Run pip install {packages}."


@contextlib.contextmanager
def needing(extra: str, setting: str, value: object, reason: str) -> Iterator[None]:
    """Run a block that imports an extra's packages. If a package is missing, raise SettingError for the setting that needs it. The
    error shows `value`, so it must not contain a secret."""
    try:
        yield
    except ImportError as exc:
        # A package without the imported name is broken, not missing. However, gRPC raises the same error if a package that it needs is missing.
        if (exc.name or "").partition(".")[0] not in MODULES[extra] or (type(exc) is ImportError and extra != "grpc"):
            raise
        raise SettingError(setting, value, reason, install_hint(extra)) from exc
