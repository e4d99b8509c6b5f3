"""Rehearsal: a small model of a queue and its slots, which shows how a policy handles given arrivals.

The rules are the production ones, applied by `core.departure.decide`. There are no tiers, tenants, failures or deadlines, no clock
and no chance. Run times vary by quantiles of the measured spread, in a fixed order."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from statistics import NormalDist

from headway.core.departure import Dispatch, Load, QueueSnapshot, Rule, decide
from headway.core.service_model import ArrivalRate
from headway.core.slot_factors import FACTORS, USUAL, scale

Rules = Callable[[float, ArrivalRate], Rule]  # Function from an instant and the learnt rate of clients to a rule.
STEP_EVENTS = 100  # Events in a step, about a millisecond.
COARSE = 8  # Arrivals come in groups of up to this share of what waits, as one more among many changes little.
RETURN_GAP = 0.0001  # Seconds between the requests of two clients that were answered together.
_BLOCK, _BLOCKS = 64, 16


@cache
def _draws(even: bool) -> list[float]:
    """Return standard normal numbers, the same in every rehearsal, so that rules are compared fairly.

    They come from the multiplicative generator of Park and Miller (CACM 31, 1988). With `even` they
    come in blocks of the same quantiles, each in another order, so that a few batches have the usual mean. Such draws would make a queue
    under load too short."""
    state, modulus, normal, draws = 1, 2**31 - 1, NormalDist(), list[float]()
    for _ in range(_BLOCKS):
        keyed = []
        for position in range(_BLOCK):
            state = state * 48_271 % modulus
            keyed.append((state, normal.inv_cdf((position + 0.5) / _BLOCK)))
        draws += [draw for _, draw in sorted(keyed)] if even else [normal.inv_cdf(key / modulus) for key, _ in keyed]
    return draws


def factors_of(load: Load) -> list[float]:
    """Return the factors of the slots of a load, see `core.slot_factors`."""
    if not any(load.paces):
        return [1.0] * load.slots
    times = scale((*load.paces[:USUAL], 0, *load.paces[USUAL + 1 :]), load.slots)
    return [factor * times for count, factor in zip(load.paces, FACTORS, strict=True) for _ in range(count)]


class Rehearsal:
    """A run of the model with the cost and slots of a load, the rules to try, and the instants of arrivals, in order. The deviation
    of a batch's time is relative to its mean. If `clients`, each entry comes back once answered, and the rate is learnt. `turn` is
    the number of the first draw, which differs between looks to vary chance."""

    def __init__(
        self, load: Load, rules: Rules, arrivals: list[float], deviation: float, clients: bool = False, turn: int = 0
    ) -> None:
        self._load, self._rules, self._arrivals, self._clients = load, rules, arrivals, clients
        spread = math.log1p(deviation * deviation)
        self._mean, self._spread = -spread / 2, math.sqrt(spread)
        self._turn = turn
        self._draws, self._factors = _draws(even=clients), factors_of(load)
        self._idle = dict.fromkeys(range(len(self._factors)))
        self._ran_at = [0] * len(self._factors)
        self._running: list[tuple[float, int, int, int]] = []  # Ends of batches, their numbers, slots and sizes.
        self._first = self._next = 0  # Positions of the first waiting arrival, and of the next to come.
        self._last = self._schedule = self._newest = self._ended = -math.inf
        self._look = math.inf
        self._departures = 0
        self.events = 0  # Number of events so far.
        self.rate = ArrivalRate()  # Arrival rate as a queue would learn it, if entries come back.
        self.latencies: list[float] = []  # Seconds from each arrival to its answer, in order of departure.
        self.answered: list[tuple[float, int]] = []  # Instants and sizes of the finished batches, if entries come back.

    def steps(self, until: float = math.inf) -> Iterator[None]:
        """Run until a given instant, or until nothing is left. Yields now and then, as a run takes milliseconds."""
        arrivals, running = self._arrivals, self._running
        while True:
            ends = running[0][0] if running else math.inf
            if not self._idle and self._next < len(arrivals) and arrivals[self._next] < ends:
                self._take(bisect_right(arrivals, ends, self._next))
            comes = arrivals[self._next] if self._next < len(arrivals) else math.inf
            now = min(comes, ends, self._look)
            if now == math.inf or now > until:
                return
            freed = None
            if ends <= now:
                freed = self._end(now)
            elif comes <= now:
                now = self._come(min(ends, self._look))
            self._serve(freed, now)
            self.events += 1
            if self.events % STEP_EVENTS == 0:
                yield

    def _come(self, before: float) -> float:
        """Let the next arrivals come, up to the next event and a full batch. Returns the instant of the last."""
        depth = self._next - self._first
        most = self._next + max(min(depth // COARSE, self._load.max_batch - depth), 1)
        self._take(
            max(bisect_right(self._arrivals, before, self._next, min(most, len(self._arrivals))), self._next + 1)
        )
        return self._newest

    def _take(self, next: int) -> None:
        self._newest = self._arrivals[next - 1]
        if self._clients:
            self.rate.observe(next - self._next, self._newest)
        self._next = next

    def _end(self, now: float) -> int:
        _, _, slot, size = heapq.heappop(self._running)
        self._ran_at[slot] = self._departures
        self._ended = now
        if self._clients:
            self.answered.append((now, size))
            begin = max(now, self._arrivals[-1])
            self._arrivals += [begin + number * RETURN_GAP for number in range(size)]
        return slot

    def _serve(self, freed: int | None, now: float) -> None:
        """Let slots claim until one has to hold. The freed slot claims first."""
        idle, self._look = self._idle, math.inf
        while freed is not None or idle:
            if self._next == self._first:
                break
            rule = self._rules(now, self.rate)
            if freed is not None:
                slot = freed
            else:
                slot = min(idle, key=self._factors.__getitem__) if rule.team else next(iter(idle))
            verdict = decide(rule, self._view(slot, rule), now)
            if isinstance(verdict, Dispatch):
                if freed is None:
                    del idle[slot]
                freed = None
                self._depart(slot, min(self._next - self._first, verdict.most), rule, now)
            elif freed is not None:
                idle[freed] = None
                freed = None
            else:
                self._look = verdict.until
                return
        if freed is not None:
            idle[freed] = None

    def _view(self, slot: int, rule: Rule) -> QueueSnapshot:
        running = self._running
        return QueueSnapshot(
            self._next - self._first,
            self._arrivals[self._first],
            math.inf,
            self._last,
            self._schedule,
            max(self._newest, self._ended) if rule.company else self._newest,
            max([batch[3] for batch in running], default=0.0),
            self._factors[slot] if rule.team else 1.0,
            self._departures - self._ran_at[slot],
            len(running),
            len(self._factors),
        )

    def _depart(self, slot: int, most: float, rule: Rule, now: float) -> None:
        load, first, size = self._load, self._first, int(min(most, self._load.max_batch))
        seconds = load.batch_seconds(size) * self._factors[slot]
        if self._spread:
            seconds *= math.exp(
                self._mean + self._spread * self._draws[(self._departures + self._turn) % len(self._draws)]
            )
        self._departures += 1
        heapq.heappush(self._running, (now + seconds, self._departures, slot, size))
        if not self._clients:
            self.latencies += [now + seconds - came for came in self._arrivals[first : first + size]]
        self._first += size
        self._last = now
        self._schedule = max(self._schedule, now) + rule.pace
