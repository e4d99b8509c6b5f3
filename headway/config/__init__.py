"""All settings, in one frozen object that checks its values when it is built. Flags, environment variables (`HEADWAY_` and
the name in capitals) and the keys of `headway.toml` all come from the same table. A flag overrides the environment, the
environment overrides the file, and the file overrides the default."""

from headway.config.settings import ALL_ROWS, CHARS, FIELDS, PREFIX, Settings, flag, idle, is_loopback, kind
from headway.config.sources import (
    fallback_batches,
    fallbacks_of,
    load,
    load_arguments,
    misspelt,
    on_terms,
    read_weights_again,
    spelling_of,
    terms_of,
)
from headway.config.urls import shown_url

__all__ = [
    "ALL_ROWS", "CHARS", "FIELDS", "PREFIX", "Settings", "fallback_batches", "fallbacks_of", "flag", "idle",
    "is_loopback", "kind", "load", "load_arguments", "misspelt", "on_terms", "read_weights_again", "shown_url", "spelling_of",
    "terms_of",
]  # fmt: skip
