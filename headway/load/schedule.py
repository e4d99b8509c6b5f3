"""Due instants of the requests of a load test."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from headway.core.arrival_trace import instants
from headway.core.arrivals import poisson, replay, uniform
from headway.errors import SettingError
from headway.load.spec import LoadSpec


class TraceFile:
    """Instants of a trace file in seconds; read anew, line by line, each time it is iterated.

    Arguments:
        path: a CSV file as `headway.core.arrival_trace` describes it.
        setting: name in errors of the setting that the path came from.
    """

    def __init__(self, path: Path, setting: str = "--arrivals") -> None:
        self._path, self._setting = path, setting

    def __iter__(self) -> Iterator[float]:
        """Yield the instants.

        Raises:
            SettingError: the file cannot be read, or is no trace.
        """
        shown = str(self._path)
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as lines:
                yield from instants(lines, shown, self._setting)
        except OSError as exc:
            reason = f"cannot be read: {exc.strerror}"
            hint = "Use poisson, uniform, or the path of a trace in CSV."
            raise SettingError(self._setting, shown, reason, hint) from None
        except UnicodeDecodeError:
            raise SettingError(self._setting, shown, "is not UTF-8 text", "Save it as UTF-8.") from None


def due_times(spec: LoadSpec) -> Iterator[float]:
    """The due instants of a load test, in seconds from its start, until its duration is over.

    Raises:
        SettingError: the arrivals are a trace that cannot be read.
    """
    if spec.arrivals == "poisson":
        stream = poisson(spec.rate, random.Random(spec.seed))  # noqa: S311 - the same seed, the same load
    elif spec.arrivals == "uniform":
        stream = uniform(spec.rate)
    else:
        stream = replay(TraceFile(Path(spec.arrivals)), spec.rate)
    return takewhile(float(spec.duration).__gt__, stream)
