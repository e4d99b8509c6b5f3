"""Report of a worker on the model that it runs, by which others know how to ask it."""

from __future__ import annotations

import msgspec


class ModelReport(msgspec.Struct, frozen=True, gc=False):
    """Report on one model.

    Attributes:
        version: version of the model; empty where the worker tells none.
        target: digest of the target; two workers with the same digest run the same code. Empty where that is not known.
        terms: settings of the model that matter to whoever asks it: names and values.
    """

    version: str = ""
    target: str = ""
    terms: tuple[tuple[str, str | int | float | bool], ...] = ()
