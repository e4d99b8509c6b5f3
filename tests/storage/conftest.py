"""Waits for files and databases, as in the contract suites."""

from tests.contracts.conftest import patient

__all__ = ["patient"]
