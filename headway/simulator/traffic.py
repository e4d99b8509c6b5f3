"""Traffic of a simulation: when requests arrive, and what entries they become."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, takewhile
from pathlib import Path

import msgspec

from headway.config.settings import MOST_WEIGHT
from headway.core.arrivals import instants, poisson, replay
from headway.errors import SettingError
from headway.model import Entry
from headway.simulator.batch_times import read_batch_times
from headway.simulator.scenario import WEIGHTS_HINT, Scenario

MOST_RANGE = 1_000_000  # Maximum weight in a range.
POISON = "poison"  # Input that makes its batch fail. Any other is harmless.


def read_trace(path: Path) -> tuple[float, ...]:
    """Read the times of a recorded trace in seconds. `headway.core.arrivals` describes the format. Raises SettingError."""
    hint = "Name a CSV file with a TIMESTAMP column, or with a single column of seconds."
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            times = tuple(instants(lines, str(path), "--trace"))
    except OSError as exc:
        raise SettingError("--trace", str(path), f"cannot be read: {exc.strerror}", hint) from None
    except UnicodeDecodeError:
        raise SettingError("--trace", str(path), "is not UTF-8 text", "Save it as UTF-8.") from None
    if len(times) < 2 or times[-1] <= times[0]:
        raise SettingError(
            "--trace", str(path), f"has {len(times)} arrivals: either fewer than 2, or all at the same time", hint
        )
    return times


def read_weights(text: str, setting: str = "--weights", hint: str = WEIGHTS_HINT) -> tuple[int, ...]:
    """Read the weights of entries, all equally likely: `LOW-HIGH` for all whole numbers from LOW to HIGH, or the path of a file that
    has one per line or was written by `headway check --record`. Raises SettingError for the option `setting`, with `hint`."""
    low, dash, high = text.partition("-")
    if dash and low.isascii() and low.isdigit() and high.isascii() and high.isdigit():
        if not 1 <= int(low) <= int(high) <= MOST_RANGE:
            raise SettingError(setting, text, f"must be two numbers from 1 to {MOST_RANGE}, the lower one first", hint)
        return tuple(range(int(low), int(high) + 1))
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
        if content.startswith("{"):
            return read_batch_times(Path(text), setting).weights
        weights = tuple(map(int, content.split()))
    except OSError as exc:
        raise SettingError(setting, text, f"cannot be read: {exc.strerror}", hint) from None
    except ValueError:
        raise SettingError(setting, text, "has a line that is not a whole number", hint) from None
    if not weights or not 1 <= min(weights) <= max(weights) <= MOST_WEIGHT:
        raise SettingError(setting, text, f"has no weights, or one outside the range 1 to {MOST_WEIGHT}", hint)
    return weights


def arrivals(scenario: Scenario, rng: random.Random) -> Iterator[float]:
    """Yield the times of arrivals within the duration; none if a closed loop of `clients` sends the requests. Raises
    SettingError if a trace has no rate."""
    if scenario.clients:
        return iter(())
    if scenario.trace:
        return takewhile(float(scenario.duration).__gt__, replay(scenario.trace, scenario.rate))
    return _steps(scenario, rng)


def _steps(scenario: Scenario, rng: random.Random) -> Iterator[float]:
    """Yield Poisson arrivals at a rate that may change in steps."""
    starts = [0.0, *(step.at for step in scenario.steps)]
    rates = [scenario.rate, *(step.rate for step in scenario.steps)]
    for start, rate, end in zip(starts, rates, [*starts[1:], scenario.duration], strict=True):
        for instant in poisson(rate, rng):
            if start + instant >= min(end, scenario.duration):
                break
            yield start + instant


def callers(scenario: Scenario, rng: random.Random) -> Callable[[], Entry]:
    """Return a function that draws the next entry. Identical entries are the same object, because simulations don't need ids."""
    kinds: list[Entry] = []
    weights: list[float] = []
    poison = scenario.faults.poison
    for tier, weight in enumerate(scenario.mix.values()):
        for tenant in range(scenario.tenants):
            for text, share in (("", 1.0 - poison), (POISON, poison)):
                if weight * share > 0.0:
                    kinds.append(_entry(scenario, tier, f"tenant-{tenant}", text))
                    weights.append(weight * share / scenario.tenants)
    draw = _drawing(kinds, weights, rng)
    return _weighed(draw, scenario.weights, rng) if scenario.weights else draw


def bulk_lines(scenario: Scenario, rng: random.Random) -> Iterator[Entry]:
    """Yield an endless series of bulk entries of one tenant, with the same weights as other entries."""
    entry = _entry(scenario, len(scenario.mix), "bulk", "")
    draw = _weighed(lambda: entry, scenario.weights, rng) if scenario.weights else lambda: entry
    while True:
        yield draw()


def _weighed(draw: Callable[[], Entry], weights: Sequence[int], rng: random.Random) -> Callable[[], Entry]:
    """Return a function that draws an entry and assigns it one of the weights."""
    weighed: dict[tuple[int, int], Entry] = {}

    def draw_weighed() -> Entry:
        entry, weight = draw(), weights[int(rng.random() * len(weights))]
        known = weighed.get((id(entry), weight))
        if known is None:
            known = weighed[id(entry), weight] = msgspec.structs.replace(entry, weight=weight)
        return known

    return draw_weighed


def _drawing(kinds: list[Entry], weights: list[float], rng: random.Random) -> Callable[[], Entry]:
    if len(kinds) == 1:
        return lambda: kinds[0]
    bounds = [bound / sum(weights) for bound in accumulate(weights)]
    bounds[-1] = 1.0
    roll = rng.random
    return lambda: kinds[bisect_right(bounds, roll())]


def _entry(scenario: Scenario, tier: int, tenant: str, text: str) -> Entry:
    return Entry(
        id="", model="", input=text, tier=tier, tenant=tenant, gateway="", queue_timeout=scenario.queue.queue_timeout,
        timeout=scenario.queue.timeout,
    )  # fmt: skip
