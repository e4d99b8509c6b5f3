"""`paced`: evenly spaced departures, the default.

With a fixed batch time, "leave whenever a GPU is free" makes GPUs bunch like buses on a line. One leaves full, and the next nearly
empty right behind it. An even gap between departures needs no more GPUs, and cuts the longest wait from a whole batch time to one
gap. With batch time ℓ(n) = α + βn, k GPUs and arrival rate λ, each departure carries n = λs, and k departures must fit into one
batch time, k·s = α + βλs:

    s* = α / (k − βλ)

Saturation. All batches are full, and GPUs that came free together would always leave together, each with what the others left
behind. So a full batch leaves only when a schedule has reached it that moves on by PACE gaps with each departure. The schedule is
faster than the GPUs, so in the long run it costs none of their time. A batch may be ahead of the schedule by as much as batch times
vary, since there is no use in holding against chance. (A leaky bucket as a meter, the virtual scheduling of ITU-T I.371.)

The actual gap. The formula leaves no slack. If larger batches take longer, a batch that is large by chance comes back late, the
next is larger still, and gaps bunch again. And it holds for lasting load. From idle GPUs on, the first gaps would be too long. So
the gap is ℓ(n)/k for the largest batch n on a GPU, the pace at which GPUs come back at that moment. This leads to s* by itself:
λ·ℓ(n)/k arrivals come in a gap, and n = λs* is the fixed point. After a start it would get there too late, as batches are few and
small. So the first batch of each GPU leaves s* after the one before, and is not cut.

Varying batch times. GPUs come back at uneven moments, and the largest batch is large by chance. So the part of the gap due to α is
somewhat longer, and the part due to the size is shorter. A single GPU needs no spacing, and only waits for a few others to join.

Different slots. k slots do Σ 1/fᵢ times as much as one of factor 1, and an even gap would hold the fast slots back. A request waits
for a gap, then a batch: gᵢ + ℓᵢ. The longest of these sums is least if all are equal, gᵢ = C − ℓᵢ. As each slot leaves every ℓᵢ and
the gaps fill all time, Σ gᵢ/ℓᵢ = 1, so C = (k + 1) / Σ 1/ℓᵢ. A slot with ℓᵢ ≥ C would make C longer, so it takes no part, and only
helps out. Given the mean gap s*, slots take part from the fastest on, as many as make (k + 1)·s* least while a batch of that gap's
arrivals, with room for chance, still fits.

Cutting. Clients that ask again once answered come back together. They would ride in one batch for ever while other GPUs rest, or in
a large batch and small batches by turns. So if the waiting entries are well over an even share, which is the kth part of all that
wait or run, they are cut. In j batches that leave a gap apart, the mean time until n are back, (α + βn/j)·(1 + (j−1)/2k), is least
at the whole number next to √(βn·(2k−1)/α). They are cut into no more.

Bursts. The gap since the last departure says little, as the first request of a burst would take a GPU for itself while the rest
wait. So if a request comes late in a gap in which others were due, it gets a gap of its own to gather a batch, that of idle GPUs,
α/k, unless again nobody follows. Poisson arrivals hardly notice.

Waiting clients. They are served best in fixed groups, one on each slot. Then nobody waits for a GPU, and no GPU for a client. So
their rule keeps no gap. When a batch has come back, its clients ask again within a moment, and leave once that is over. If they are
fewer than half an even part of all clients, they wait for the next group to come back, and join it.

No formula is best everywhere. Given recent arrivals, a look-ahead shows if a window, or leaving at once, would have done better,
and then uses that rule (`core.look_ahead`).

Holding vehicles against bunching is known from public transport (Daganzo, "A headway-based approach to eliminate bus bunching",
Transportation Research B 43, 2009); the formula for batch servers is ours."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from headway.core.departure import Load, Rule
from headway.core.look_ahead import LookAhead
from headway.core.slot_factors import FACTORS, STEP, USUAL, scale

DEFAULT_WINDOW = 0.040  # Seconds that the policy `window` waits, and `pid` aims at, by default.

LIGHT, NORMAL, HEAVY = (16, 0.030), (32, 0.050), (64, 0.100)  # Rows of `table`: batch size and window in seconds.

KP, KI, KD = 0.3, 0.1, 0.05  # Gains of `pid`.


def _rule(load: Load, window: float, size: int) -> Rule:
    size = min(size, load.max_batch)
    return Rule(size=size, window=window, rate=load.rate, service=load.batch_seconds(size))


class Window:
    """`window`: waits at most `max_wait` seconds, the usual rule."""

    def __init__(self, max_wait: float) -> None:
        self._window = max_wait

    def rule(self, load: Load) -> Rule:
        # Without `_rule`, whose call would exceed the budget of a list.
        size = load.max_batch
        return Rule(size=size, window=self._window, rate=load.rate, service=load.batch_seconds(size))


class Table:
    """`table`: three fixed pairs of batch size and window, chosen by load. It is a baseline, and predictable.

    below 50 % busy and fewer than 10 waiting   16 / 30 ms
    above 85 % busy or more than 100 waiting    64 / 100 ms
    otherwise                                   32 / 50 ms"""

    def rule(self, load: Load) -> Rule:
        """Return the rule of the row that fits the load. Sizes are limited by the largest batch."""
        if load.utilisation > 0.85 or load.depth > 100:
            size, window = HEAVY
        elif load.utilisation < 0.50 and load.depth < 10:
            size, window = LIGHT
        else:
            size, window = NORMAL
        return _rule(load, window, size)


class Pid:
    """`pid`: moves the window, from 0 to twice the target, until the oldest member's wait meets `target` seconds.

    The textbook discrete PID in velocity form (Åström and Murray, "Feedback Systems", ch. 11): at each departure,

        e = target − wait;   window += Kp·(e − e₁) + Ki·e + Kd·(e − 2e₁ + e₂)

    The velocity form has no separate integrator, so clamping the window prevents windup."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._window = target
        self._errors = (0.0, 0.0)
        self._seen = 0

    def rule(self, load: Load) -> Rule:
        """Return the rule with the present window, which moves once per departure, however often this is called."""
        if load.departures != self._seen:
            self._seen = load.departures
            last, before = self._errors
            error = self._target - load.wait
            step = KP * (error - last) + KI * error + KD * (error - 2 * last + before)
            self._window = min(max(self._window + step, 0.0), 2 * self._target)
            self._errors = (error, last)
        return _rule(load, self._window, load.max_batch)


WORTH_SPACING = 1.0  # Expected arrivals in a gap (λα/k) below which a request leaves at once, without spacing.

SATURATED = 0.8  # Share of the GPUs' capacity in use above which even full batches are spaced.
PACE = 0.95  # Gaps by which each departure moves the schedule of full batches on; below 1, to never limit throughput.
TOLERANCE = 0.0625  # Gaps by which a full batch may be ahead of that schedule.
TOLERANCE_DEVIATIONS = 4.0  # Standard deviations of the batch time by which it may be ahead besides.
SILENCE = 3.0  # Mean gaps between arrivals after which a silence isn't chance, as 5 % of Poisson gaps are longer.

LONGER = 0.3  # Share by which the part of a gap due to α grows for each relative standard deviation of the batch time.
# Relative standard deviation that is assumed at a start, and batches of each GPU until nothing is assumed any more.
PRESUMED, PRESUMED_FOR = 0.3, 2.0
SMALLER = 2.0  # How much less the size of the largest batch counts in a gap, likewise, as it is partly chance.

# Slower slots take part only if latency with them is below this multiple of that without, as they never come back evenly spaced.
WORTH_MORE = 0.95
ROOM = 0.5  # Standard deviations of a batch's size for which a full batch must have room.
ALIKE = 0.2  # Standard deviation of slots' factors below which waiting entries are shared out as if slots were alike.
LEAST_SPARE = 0.1  # Share of the slots' capacity that the inputs themselves, β, must leave for the slots to be enough.

MOMENT = 0.05  # Part of α without an arrival after which all clients answered together have come back.
LONGEST_WAIT = 1.5  # Longest wait of too few clients for another slot's clients, in batch times of an even part.
LEAST_COMPANY = 0.5  # Share of an even part of all clients below which they are too few to leave.
LEAST_GAP = 1e-6  # Seconds of a gap too short to hold anybody back. With no gap, the first client would leave alone.
EVENLY = 1e6  # Square of more batches than there are slots, for a unit of size, so that every batch is an even part.


class Team(msgspec.Struct, frozen=True):
    """Slots that take part, which are the fastest."""

    slots: int  # Their number.
    speed: float  # Batches that they run together in the time of one on a slot of factor 1: Σ 1/fᵢ.
    slowest: float = math.inf  # Factor above which a slot takes no part.
    spread: float = 0.0  # Standard deviation of the factors.


def team(load: Load) -> Team:
    """Choose the slots that take part."""
    if not any(load.paces):
        return Team(load.slots, load.slots)
    times = scale((*load.paces[:USUAL], 0, *load.paces[USUAL + 1 :]), load.slots)
    best, least = Team(load.slots, load.slots), math.inf
    slots, speed, sum_, squares = 0, 0.0, 0.0, 0.0
    for count, factor in zip(load.paces, (factor * times for factor in FACTORS), strict=True):
        if not count:
            continue
        slots, speed = slots + count, speed + count / factor
        sum_, squares = sum_ + count * factor, squares + count * factor * factor
        spare = speed - load.beta * load.size_rate
        if load.alpha <= 0.0 or spare <= LEAST_SPARE * speed:
            continue
        gap = load.alpha / spare
        size = load.size_rate * gap
        if size + ROOM * math.sqrt(size) <= load.max_batch and (slots + 1) * gap < WORTH_MORE * least:
            least = (slots + 1) * gap
            best = Team(slots, speed, factor * math.exp(STEP / 2))
    mean = sum_ / slots
    spread = math.sqrt(max(squares / slots - mean * mean, 0.0))
    if max(load.paces) == slots:
        return Team(load.slots, load.slots)
    return Team(best.slots, best.speed, best.slowest, spread)


def headway(load: Load, speed: float | None = None) -> float:
    """Return the even gap s* in seconds, given the speed of the slots that take part; 0 if too few arrivals come in a gap."""
    speed = load.slots if speed is None else speed
    if speed <= 0.0 or load.rate * load.alpha / speed < WORTH_SPACING:
        return 0.0
    saturated = load.batch_seconds(load.max_batch) / speed
    spare = speed - load.beta * load.size_rate
    return min(load.alpha / spare, saturated) if spare > 0.0 else saturated


class Paced:
    """Spaces departures by the headway, with a further limit on the wait in seconds, if given."""

    def __init__(self, max_wait: float | None = None) -> None:
        self._window = math.inf if max_wait is None else max_wait
        window = Window(min(DEFAULT_WINDOW, self._window))
        rules = {"paced": self.spaced, "window": window.rule, "eager": _at_once}
        self._ahead = LookAhead(rules, {"paced": self.spaced, "together": self.together, **rules})

    def rule(self, load: Load) -> Rule:
        """Return the rule of even gaps, unless the look-ahead found a better rule for recent arrivals."""
        past = load.past
        return self._ahead.rule(load, past) if past is not None and past.tells else self.spaced(load)

    def spaced(self, load: Load) -> Rule:
        """Return the rule of even gaps. A largest batch leaves at once, others a kth part of a batch time after the last."""
        chosen = team(load)
        gap = headway(load, chosen.speed)
        service = load.batch_seconds(load.max_batch)
        silence = SILENCE / load.rate if gap > 0.0 else 0.0
        saturated = load.slots > 1 and load.size_rate * service > SATURATED * chosen.speed * load.max_batch
        usual = load.alpha + load.beta * min(load.size_rate * gap, load.max_batch)
        deviation = math.hypot(load.deviation, chosen.spread * usual)
        begins = load.departures < load.slots
        presumed = PRESUMED * max(1.0 - load.departures / (PRESUMED_FOR * max(load.slots, 1)), 0.0)
        varied = max(load.deviation / usual, presumed) if gap > 0.0 else 0.0
        least = load.alpha / chosen.speed * (1.0 + LONGER * varied) if gap > 0.0 else 0.0
        each = load.beta / chosen.speed / (1.0 + SMALLER * varied) if gap > 0.0 else 0.0
        cuts = gap > 0.0 and chosen.spread < ALIKE and not begins
        if load.slots == 1:
            least, each = min(least, silence), 0.0
        elif begins:
            least, each = max(least, gap), 0.0
        return Rule(
            size=load.max_batch,
            headway=least,
            gap_each=each,
            split=load.beta * (2 * chosen.slots - 1) / load.alpha if cuts else 0.0,
            window=self._window,
            rate=load.rate,
            service=service,
            pace=PACE * gap if saturated else 0.0,
            tolerance=TOLERANCE * gap + TOLERANCE_DEVIATIONS * deviation if saturated else math.inf,
            gather=max(0.0, load.alpha / chosen.speed - silence) if gap > 0.0 else 0.0,
            quiet=silence,
            team=chosen.slots if chosen.spread else 0.0,
            speed=chosen.speed if chosen.spread else 0.0,
            slowest=chosen.slowest,
            batch=usual if chosen.spread else 0.0,
        )

    def together(self, load: Load) -> Rule:
        """Return the rule that keeps clients together that were answered together, about evenly spread over the slots."""
        spaced = self.spaced(load)
        clients, slots = load.past.clients if load.past is not None else 0, int(spaced.team) or load.slots
        even = min(int(clients * load.entry_size) // max(slots, 1), load.max_batch)
        return replace(
            spaced,
            headway=LEAST_GAP,
            gap_each=0.0,
            split=EVENLY if load.beta > 0.0 else 0.0,
            pace=0.0,
            tolerance=math.inf,
            gather=LONGEST_WAIT * load.batch_seconds(even),
            quiet=MOMENT * load.alpha,
            company=LEAST_COMPANY * even,
        )


def _at_once(load: Load) -> Rule:
    """Let waiting entries leave as soon as a GPU is free."""
    return Rule(size=load.max_batch, headway=0.0)
