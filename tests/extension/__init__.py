"""Additions as docs/architecture.md describes them, tried."""
