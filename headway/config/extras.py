"""Packages beyond the ones that every installation has: which job needs which, and how to install them.

A hint names the packages and not the extra `headway[…]`: that name works only with a checkout or a wheel at hand, and a package
index would look for a project of that name.
"""

from __future__ import annotations

from collections.abc import Mapping

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "redis": ("redis>=8.1,<9", "hiredis>=3.5,<4"),
    "postgres": ("asyncpg>=0.31,<0.33",),
    "jwt": ("PyJWT[crypto]>=2.13,<3",),
    "grpc": ("grpcio>=1.80,<2", "hpack>=4.1,<5", "protobuf>=6.33,<8"),
    "otel": ("grpcio>=1.80,<2",),
    "chat": ("jinja2>=3.1.6,<4",),
    "policy": ("google-re2>=1.1.20251105,<2",),
    "gpu": ("nvidia-ml-py>=12.575,<14",),
    "plot": ("matplotlib>=3.11,<4",),
}
"""Requirements by the name of their extra, as in pyproject.toml."""


def install_hint(extra: str) -> str:
    """Say how to install what `extra` brings, wherever Headway itself came from."""
    packages = " ".join(f"'{package}'" for package in PACKAGES[extra])
    return f"Install it: pip install {packages}."
