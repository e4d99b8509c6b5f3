"""Settings of the whole test run."""

from __future__ import annotations

from hypothesis import settings

# The machine that checks is shared and slow at times: a case may take long, and the same cases run every time.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")
