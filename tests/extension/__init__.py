"""Additions made as docs/architecture.md describes, and tried."""
