"""Look-ahead: finds the rule that works best for recent arrivals by trying each rule on them.

Even gaps are nearly always best, except for two GPUs of different speeds, bursts that each fill a batch, or clients that all wait for
their answers. So now and then, the arrivals of the last few seconds are replayed through a small model of the queue (`Rehearsal`)
under each rule. If another rule answers sooner, it is used until the next look. The 95th percentile of latency depends on large
bursts, which are rare within a single look, so latencies are kept in histograms that decay slowly.

If clients wait for answers, their arrivals can't be replayed. Instead, the model simulates the same number of clients, each of which
sends its next request once answered, and the rule with the most answers wins. Some rules can sustain a good rhythm but never settle
into it by themselves. So looks alternate: in one, the clients start simultaneously; in the next, spread over the duration of a batch.

A look is divided into steps, a few for each rule, so that no step takes more than about a millisecond."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from statistics import NormalDist

from msgspec.structs import replace

from headway.core.departure import Dispatch, Load, Past, QueueSnapshot, Rule, decide
from headway.core.service_model import ArrivalRate
from headway.core.slot_factors import FACTORS, USUAL, scale

Rules = Callable[[float, ArrivalRate], Rule]  # Maps a time and the learnt rate of clients to a rule.
STEP_EVENTS = 100  # Events in a step, which take about a millisecond.
COARSE = 8  # Arrivals come in groups of at most one for this many waiting entries, which changes little.
RETURN_GAP = 0.0001  # Seconds between the new requests of two clients that were answered together.
_BLOCK, _BLOCKS = 64, 16


@cache
def _draws(even: bool) -> list[float]:
    """Return standard normal numbers (generator of Park and Miller, CACM 31, 1988). They are the same in every rehearsal, so
    that rules are compared fairly. If `even` is set, they come in blocks with the same quantiles, so that the mean of a few
    batches is already about right. It isn't set for an open load, because queues would be too short."""
    state, modulus, normal, draws = 1, 2**31 - 1, NormalDist(), list[float]()
    for _ in range(_BLOCKS):
        keyed = []
        for position in range(_BLOCK):
            state = state * 48_271 % modulus
            keyed.append((state, normal.inv_cdf((position + 0.5) / _BLOCK)))
        draws += [draw for _, draw in sorted(keyed)] if even else [normal.inv_cdf(key / modulus) for key, _ in keyed]
    return draws


def factors_of(load: Load) -> list[float]:
    """Return the factors of a load's slots; see `core.slot_factors`."""
    if not any(load.paces):
        return [1.0] * load.slots
    times = scale((*load.paces[:USUAL], 0, *load.paces[USUAL + 1 :]), load.slots)
    return [factor * times for count, factor in zip(load.paces, FACTORS, strict=True) for _ in range(count)]


class Rehearsal:
    """A run of the model. `load` gives the cost of batches and the slots, `rules` gives the rule at each time, and `arrivals`
    are times in order. `deviation` is that of a batch's time, relative to its mean. If `clients` is set, the arrivals are the
    first entries of clients that each send the next one once answered, and their rate is learnt. `turn` is the index of the
    first random number to use, so that each look can use different ones."""

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
        self._running: list[tuple[float, int, int, int]] = []  # End, number, slot and size of each batch.
        self._first = self._next = 0  # Indices of the first waiting arrival, and of the next one to come.
        self._last = self._schedule = self._newest = self._ended = -math.inf
        self._look = math.inf
        self._departures = 0
        self.events = 0  # Number of events so far.
        self.rate = ArrivalRate()  # Arrival rate as a queue would learn it, if there are clients.
        self.latencies: list[float] = []  # Seconds from each arrival to its answer, in order of departure.
        self.answered: list[tuple[float, int]] = []  # End and size of each finished batch, if there are clients.

    def steps(self, until: float = math.inf) -> Iterator[None]:
        """Run until a given time, or until nothing is left. Yields now and then, because a run takes milliseconds."""
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
        """Add the next arrivals, up to the next event or a full batch. Returns the time of the last arrival."""
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
        """Let slots claim until one has to hold, starting with the freed slot."""
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


Make = Callable[[Load], Rule]  # Maps a load to a rule. Has no state.

EVENTS = 3000.0  # Most events rehearsed per second of arrivals, on average. If there are more, only some are rehearsed.
QUIET = 8  # After this many looks in a row that keep the usual rule, each pause doubles.
RAREST = 64  # Largest factor by which the pause grows. It is reset if the rate changes by a quarter.
SPAN = 12.0  # A record must span this many full batches, run one after the other.
FEWEST_SLOTS = 2  # Fewest slots for which arrivals are replayed. With one, no better rule was found.
SETTLED = 0.2  # Share of a record whose latencies don't count, because the queue starts empty.
PARTS = 4  # A record is cut into parts with the same number of arrivals. Their lengths show if arrivals are even.
EVEN = 1.25  # Arrivals count as even up to this ratio of the longest to the shortest part.
STEPPED = 1.15  # If the mean rates of two even records differ by more than this factor, it isn't chance.
LOOKS = 4  # Looks before the first choice.
DECAY = 0.9  # Factor by which the histograms fade at each look.
MARGIN = 1.03  # Another rule must be better by this factor to be chosen. It is then kept while it is better at all.
CLIENTS_MARGIN = 1.01  # The same for clients, whom the model predicts well, relative to the current rule.
TURN = 149  # Each look starts this many random numbers after the previous one.
FINENESS = 100  # Histogram buckets for each e-fold of latency.
RATES = 20.0  # Arrival rates are rounded to this many steps for each e-fold. A rule is made for each step.
GROUP = 8  # Arrivals after which the rate is read again.
KNOWN_AFTER = 0.5  # Seconds from a record's start for which its mean rate is used instead of the learnt one.
ROUNDS, SETTLED_ROUNDS = 60, 15  # Full batches for which clients are rehearsed, and how many of these don't count.
NEWEST = 0.3  # Weight of the newest look at clients.
LATER, LATEST = 1.5, 1000  # Clients are rehearsed again after departures grew by this factor, or by this many.


class Latencies:
    """Histogram of latencies that slowly forgets."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}

    def add(self, seconds: list[float]) -> None:
        counts = {bucket: count * DECAY for bucket, count in self._counts.items() if count > 0.01}
        for latency in seconds:
            bucket = math.floor(math.log(latency) * FINENESS)
            counts[bucket] = counts.get(bucket, 0.0) + 1.0
        self._counts = counts

    def p95(self) -> float:
        left = 0.05 * sum(self._counts.values())
        for bucket in sorted(self._counts, reverse=True):
            left -= self._counts[bucket]
            if left <= 0.0:
                return math.exp((bucket - left / self._counts[bucket]) / FINENESS)
        return 0.0


class LookAhead:
    """Chooses one of `rules`, or one of `of_clients` if clients wait for their answers. The default rule is first in both."""

    def __init__(self, rules: Mapping[str, Make], of_clients: Mapping[str, Make] | None = None) -> None:
        self._rules, self._rules_of_clients = rules, of_clients or rules
        self._usual = self.chosen = next(iter(rules))  # Names of the default rule and of the one in use.
        self._looks = self._quiet = 0  # Looks so far, and how many in a row have just kept the usual rule.
        self._mean = 0.0  # Mean arrival rate in the last look.
        self._even = 0.0  # Mean arrival rate in the last even record; 0 if there was none.
        self._latencies = {name: Latencies() for name in rules}
        self._again = 0  # Number of departures at which to rehearse clients again.
        self._clients = False
        self._apart = True  # True if clients start spread over a batch's time in the next look. It alternates.
        self._answers: dict[str, float] = {}  # Answers under each rule relative to the usual one, averaged over looks.
        self._look: Iterator[None] | None = None

    def rule(self, load: Load, past: Past) -> Rule:
        """Return the rule for this load. Also takes a step of a look, if one is due."""
        if (past.clients > 1) is not self._clients:
            self._clients, self._look, self._again = not self._clients, None, 0
            past.resume()
            self._forget()
        if self._look is None and (self._clients or past.long):
            entries = load.in_entries()
            self._look = self._of_clients(entries, past) if self._clients else self._of_arrivals(entries, past)
        if self._look is not None and next(self._look, self) is self:
            self._look = None
        return (self._rules_of_clients if self._clients else self._rules)[self.chosen](load)

    def _forget(self) -> None:
        self.chosen, self._looks, self._quiet = self._usual, 0, 0
        self._latencies = {name: Latencies() for name in self._rules}

    def _of_arrivals(self, load: Load, past: Past) -> Iterator[None] | None:
        if load.slots < FEWEST_SLOTS or load.alpha <= 0.0:
            return None
        arrived = past.take(SPAN * load.batch_seconds(load.max_batch))
        return self._by_latency(load, past, arrived) if arrived else None

    def _heed_step(self, arrived: list[float], mean: float) -> None:
        """Forget earlier looks if the mean rate of even arrivals has jumped. The rate of bursts always varies."""
        if _are_even(arrived):
            if self._even and _apart(mean, self._even) > STEPPED:
                self._forget()
            self._even = mean

    def _by_latency(self, load: Load, past: Past, arrived: list[float]) -> Iterator[None]:
        rates = _Rates(arrived)
        self._heed_step(arrived, rates.mean)
        usual = max(min(rates.mean * load.alpha / load.slots, load.max_batch), 1.0)
        deviation = load.deviation / load.batch_seconds(int(usual))
        skipped, events = int(len(arrived) * SETTLED), 0
        for name, make in self._rules.items():
            rules = _ByRate(load, make)
            rehearsal = Rehearsal(load, partial(_recorded, rules, rates), arrived, deviation, turn=TURN * self._looks)
            yield from rehearsal.steps()
            self._latencies[name].add(rehearsal.latencies[skipped:])
            events += rehearsal.events
            yield
        self._looks += 1
        if self._looks >= LOOKS:
            self._choose({name: 1.0 / max(latencies.p95(), 1e-9) for name, latencies in self._latencies.items()})
        alike = _apart(rates.mean, self._mean or rates.mean) < 1.25
        self._quiet = self._quiet + 1 if alike and self.chosen == self._usual else 0
        self._mean = rates.mean
        past.resume(arrived[0] + events / EVENTS * min(2 ** max(self._quiet - QUIET, 0), RAREST))

    def _of_clients(self, load: Load, past: Past) -> Iterator[None] | None:
        if load.departures < self._again or load.alpha <= 0.0:
            return None
        self._again = load.departures + min(int(load.departures * (LATER - 1.0)) + 10, LATEST)
        return self._by_answers(load, past.clients)

    def _by_answers(self, load: Load, clients: int) -> Iterator[None]:
        each = load.batch_seconds(max(min(clients // load.slots, load.max_batch), 1))
        seconds = load.batch_seconds(min(clients, load.max_batch))
        gap = max(each / clients, RETURN_GAP) if self._apart else RETURN_GAP
        self._apart, usual = not self._apart, 1
        for name, make in self._rules_of_clients.items():
            first = [number * gap for number in range(clients)]
            rehearsal = Rehearsal(load, _ByRate(load, make).learnt, first, load.deviation / each, clients=True)
            yield from rehearsal.steps(ROUNDS * seconds)
            answers = sum(size for at, size in rehearsal.answered if at >= SETTLED_ROUNDS * seconds)
            if name == self._usual:
                usual = max(answers, 1)
            before = self._answers.get(name, answers / usual)
            self._answers[name] = before + (answers / usual - before) * NEWEST
            best = max(self._answers, key=self._answers.__getitem__)
            if self._answers[best] > CLIENTS_MARGIN * self._answers[self.chosen]:
                self.chosen = best
            yield

    def _choose(self, worth: Mapping[str, float]) -> None:
        best = max(worth, key=worth.__getitem__)
        margin = MARGIN if self.chosen == self._usual else 1.0
        self.chosen = best if worth[best] > margin * worth[self._usual] else self._usual


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def _are_even(arrived: list[float]) -> bool:
    """Return True if arrivals come at a constant rate, as in a Poisson process, rather than in bursts."""
    part = (len(arrived) - 1) // PARTS
    seconds = [arrived[at + part] - arrived[at] for at in range(0, part * PARTS, part)]
    return max(seconds) <= EVEN * min(seconds)


def _recorded(rules: _ByRate, rates: _Rates, now: float, _: ArrivalRate) -> Rule:
    return rules.rule(rates.at(now))


class _ByRate:
    """Rules by arrival rate. Rates are rounded, so that each rule is made once."""

    def __init__(self, load: Load, make: Make) -> None:
        self._load, self._make = load, make
        self._known: dict[int, Rule] = {}

    def rule(self, rounded: int) -> Rule:
        rule = self._known.get(rounded)
        if rule is None:
            rule = self._known[rounded] = self._make(replace(self._load, rate=math.exp(rounded / RATES)))
        return rule

    def learnt(self, now: float, rate: ArrivalRate) -> Rule:
        return self.rule(_rounded(rate.at(now)))


def _rounded(rate: float) -> int:
    return round(math.log(max(rate, 1e-3)) * RATES)


class _Rates:
    """Rounded rates of recorded arrivals, as a queue would have learnt them."""

    def __init__(self, arrived: list[float]) -> None:
        self.mean = len(arrived) / max(arrived[-1] - arrived[0], 1e-9)
        self._at, self._rounded = list[float](), list[int]()
        learnt = ArrivalRate()
        for position in range(0, len(arrived), GROUP):
            now = arrived[position]
            learnt.observe(min(GROUP, len(arrived) - position), now)
            rate = learnt.at(now) if now - arrived[0] > KNOWN_AFTER else self.mean
            self._at.append(now)
            self._rounded.append(_rounded(rate))

    def at(self, now: float) -> int:
        return self._rounded[max(bisect_right(self._at, now) - 1, 0)]
