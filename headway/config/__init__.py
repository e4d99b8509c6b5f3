"""All settings, in one frozen object, checked when it is built.

Each field carries its help text, its unit and the group it is shown under; flags, environment variables
(`HEADWAY_` and the name in capitals) and the keys of `headway.toml` are all derived from the same table.
A flag beats the environment, which beats the file, which beats the default.

    settings   the table: every field, with all that is known of it, and what is refused of several together
    fields     what can be known of a field, and the bounds of its value by itself
    sources    flags, environment and file, merged
    broker     the URL of a broker
    database   the URL of a database
    file       the file, and its tables of models
    models     what a model may have of its own
    terms      what gateways are told of a model
    fallbacks  what a gateway asks while its broker is away
    extras     packages that only some settings need
    tool_options  options of `headway simulate`, `plan` and `bench`, at the fields of what these run
"""

from headway.config.broker import shown_url
from headway.config.fallbacks import fallback_batches, fallbacks_of
from headway.config.fields import Setting
from headway.config.settings import ALL_ROWS, CHARS, FIELDS, PREFIX, Settings, flag, idle, is_loopback, kind
from headway.config.sources import load, load_arguments, misspelt, read_weights_again, spelling_of
from headway.config.terms import on_terms, terms_of

__all__ = [
    "ALL_ROWS",
    "CHARS",
    "FIELDS",
    "PREFIX",
    "Setting",
    "Settings",
    "fallback_batches",
    "fallbacks_of",
    "flag",
    "idle",
    "is_loopback",
    "kind",
    "load",
    "load_arguments",
    "misspelt",
    "on_terms",
    "read_weights_again",
    "shown_url",
    "spelling_of",
    "terms_of",
]
