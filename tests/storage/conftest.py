"""Files and databases are waited for, as in the contract suites."""

from tests.contracts.conftest import patient

__all__ = ["patient"]
