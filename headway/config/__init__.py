"""All settings, in one frozen object that is checked when it is built.

Flags, environment variables (`HEADWAY_` and the name in capitals) and the keys of `headway.toml` are all derived from the same
table. A flag beats the environment, the environment beats the file, and the file beats the default.
"""

from headway.config.derived import fallback_batches, fallbacks_of, on_terms, terms_of
from headway.config.fields import Setting
from headway.config.settings import ALL_ROWS, CHARS, FIELDS, PREFIX, Settings, flag, idle, is_loopback, kind
from headway.config.sources import load, load_arguments, misspelt, read_weights_again, spelling_of
from headway.config.urls import shown_url

__all__ = [
    "ALL_ROWS", "CHARS", "FIELDS", "PREFIX", "Setting", "Settings", "fallback_batches", "fallbacks_of", "flag", "idle",
    "is_loopback", "kind", "load", "load_arguments", "misspelt", "on_terms", "read_weights_again", "shown_url", "spelling_of",
    "terms_of",
]  # fmt: skip
