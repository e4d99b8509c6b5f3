"""Look-ahead: finds the rule that works best for recent arrivals by rehearsing each.

Even gaps are best nearly always, but no formula is best everywhere: with two GPUs of which one is slower, with bursts that each
fill a batch, with clients that all wait for their answers. So now and then the arrivals of the last seconds run through a small
model of the queue (`core.rehearsal`) under each rule. If another rule answers sooner, it holds until the next look. The 95th
percentile of latency depends on large bursts, which are few in one look. So latencies are kept in histograms in which older ones
fade.

The arrivals of clients that wait for answers depend on these, so they can't be replayed. Instead, the model has as many clients,
each of which asks again once answered, and the rule with most answers wins. Some rules keep a good rhythm but don't find it. So
clients start together in one look, and spread over a batch's time in the next.

A look is made in steps, a few for each rule, so that none takes more than about a millisecond."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from msgspec.structs import replace

from headway.core.departure import Load, Rule
from headway.core.past import Past
from headway.core.rehearsal import RETURN_GAP, Rehearsal
from headway.core.service_model import ArrivalRate

Make = Callable[[Load], Rule]  # Function from a load to a rule, without state.

EVENTS = 3000.0  # Limit on events rehearsed per second of arrivals, on average. If more come, only some are looked at.
QUIET = 8  # Looks in a row that keep the usual rule, after which each pause doubles.
RAREST = 64  # Limit on the growth of the pause between looks. A change of the rate by a quarter resets it.
SPAN = 12.0  # Full batches, run one after the other, that a record has to span.
FEWEST_SLOTS = 2  # Minimum number of slots for looking at arrivals. With one, no better rule was found.
SETTLED = 0.2  # Share of a record whose latencies don't count, as the queue starts empty.
PARTS = 4  # Parts of a record with equally many arrivals, whose lengths show if arrivals are even.
EVEN = 1.25  # Ratio of the longest to the shortest part up to which arrivals count as even.
STEPPED = 1.15  # Ratio of the mean rates of two even records that is more than chance.
LOOKS = 4  # Looks before the first choice.
DECAY = 0.9  # Weight of the histograms at each look.
MARGIN = 1.03  # Factor by which another rule must be better to be chosen. It then stays while it is better at all.
CLIENTS_MARGIN = 1.01  # The same for clients, whom the model predicts well, relative to the current rule.
TURN = 149  # Number of draws by which each look starts after the previous look.
FINENESS = 100  # Buckets of a histogram for each e-fold of latency.
RATES = 20.0  # Steps of rounded arrival rates for each e-fold. A rule is made for each.
GROUP = 8  # Arrivals after which the rate is read again.
KNOWN_AFTER = 0.5  # Seconds from a record's start for which its mean rate stands in for the learnt one.
ROUNDS, SETTLED_ROUNDS = 60, 15  # Full batches for which clients are rehearsed, and how many of them don't count.
NEWEST = 0.3  # Weight of the newest look at clients.
# Clients are rehearsed again when departures have grown by this factor, but after at most so many more.
LATER, LATEST = 1.5, 1000


class Latencies:
    """Histogram of latencies in which older ones fade."""

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
    """Chooses between rules, of which the first is the default. For clients that wait for their answers, it tries `of_clients` in
    order, which begin with the same rule."""

    def __init__(self, rules: Mapping[str, Make], of_clients: Mapping[str, Make] | None = None) -> None:
        self._rules, self._rules_of_clients = rules, of_clients or rules
        self._usual = self.chosen = next(iter(rules))  # Names of the default and of the rule that holds.
        self._looks = self._quiet = 0  # Looks so far, and the last ones in a row that kept the usual rule.
        self._mean = 0.0  # Mean rate of the last look's arrivals.
        self._even = 0.0  # Mean rate of the last even record; 0 if there was none.
        self._latencies = {name: Latencies() for name in rules}
        self._again = 0  # Number of departures at which clients are rehearsed again.
        self._clients = False
        self._apart = True  # Clients start spread over a batch's time at every second look, as some rhythms last.
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
        """Forget earlier looks if the mean rate of even arrivals jumped. The rate of bursts always varies."""
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
        """Rehearse clients that wait for their answers, now and then."""
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
            self._choose_by_answers()
            yield

    def _choose(self, worth: Mapping[str, float]) -> None:
        best = max(worth, key=worth.__getitem__)
        margin = MARGIN if self.chosen == self._usual else 1.0
        self.chosen = best if worth[best] > margin * worth[self._usual] else self._usual

    def _choose_by_answers(self) -> None:
        """Choose the rule with most answers to clients, if it is enough better than the current one."""
        best = max(self._answers, key=self._answers.__getitem__)
        if self._answers[best] > CLIENTS_MARGIN * self._answers[self.chosen]:
            self.chosen = best


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def _are_even(arrived: list[float]) -> bool:
    """Return True if arrivals come at a constant rate, such as Poisson arrivals, rather than in bursts."""
    part = (len(arrived) - 1) // PARTS
    seconds = [arrived[at + part] - arrived[at] for at in range(0, part * PARTS, part)]
    return max(seconds) <= EVEN * min(seconds)


def _recorded(rules: _ByRate, rates: _Rates, now: float, _: ArrivalRate) -> Rule:
    return rules.rule(rates.at(now))


class _ByRate:
    """Rules by arrival rate, which is rounded so that each rule is made once."""

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
