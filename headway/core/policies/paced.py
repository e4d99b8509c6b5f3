"""`paced`: evenly spaced departures, the default.

With a fixed batch time, "leave whenever a GPU is free" makes GPUs lock in phase, as buses bunch on a line:
one leaves full, the next nearly empty right behind it. Holding an even gap between departures needs no more
GPUs and takes the worst wait from a whole batch time to one gap. With batch time ℓ(n) = α + βn, k GPUs and
arrival rate λ, each departure carries n = λs, and k departures must fit into one batch time, k·s = α + βλs:

    s* = α / (k − βλ)

Near saturation every batch is full, and GPUs that came free together would leave together for ever, each finding
the queue that all of them left behind. There a full batch leaves only when a schedule that moves on by PACE gaps a
departure has come to it. The schedule is faster than the GPUs, so in the long run it costs none of their time; and a
batch may run ahead of it by what batch times are seen to vary, for against chance there is nothing to hold. (A leaky
bucket as a meter, the virtual scheduling of ITU-T I.371.)

The formula leaves no slack: where a batch takes longer the more it holds, one that chance has made large comes back late,
the next leaves larger still, and gaps bunch again. And it is of a load that lasts: from idle GPUs on, the first gaps would
be as long as if full ones came back. So the gap is ℓ(n)/k for the largest batch n on a GPU. That is the pace at which GPUs
come back at that moment. It leads to s* by itself, for λ·ℓ(n)/k arrive in it, and n = λs* is where that stays.
At a start it would lead there too late: few and small batches run as yet. So the first batch of each GPU leaves a gap of s* after
the one before, and is not cut.

Batch times that vary make GPUs come back at uneven moments, and the largest batch a matter of chance. So with them the part of
the gap that α makes is somewhat longer, and the part that the size makes is shorter. One GPU has none to be spaced from: it
waits only for company.

Where slots differ, k of them do Σ 1/fᵢ times what one of factor 1 does, and an even gap would hold the fast ones back.
What a request waits for most is the gap before its batch, then the batch: gᵢ + ℓᵢ. That is least where it is as long on each
slot, gᵢ = C − ℓᵢ. As each slot leaves every ℓᵢ and the gaps fill all time, Σ gᵢ/ℓᵢ = 1, so C = (k + 1) / Σ 1/ℓᵢ. A slot with
ℓᵢ ≥ C makes C longer: it takes no part, and only helps out. With the mean gap s* the slots that take part are those, fastest
first, for which (k + 1)·s* is least and a batch of that gap's arrivals, with room for chance, is not overfull.

Clients that send again when they have their answers come back together, and would ride in one batch for ever, while the
other GPUs rest, or in a large one and small ones in turn. So what waits is cut where it is well over its even share: the kth
part of all that waits and runs. In j batches that leave a gap apart, the mean time until n are back,
(α + βn/j)·(1 + (j−1)/2k), is least at the whole number next to √(βn·(2k−1)/α), and in more they are not cut.

In bursts, the gap since the last departure says little: the first request of a burst would take a GPU for itself, and
the rest wait. So one that comes late in a gap in which others were due is given a gap of its own to gather a batch, that of
idle GPUs, α/k, unless again nobody follows. Poisson arrivals hardly notice.

Clients ride on together best, each group on its slot: then nobody waits for a GPU, and no GPU for a client. So there is a
rule for them that keeps no gap. When a batch has come back, its clients ask again within a moment, and leave as soon as that is
over. Fewer than half an even part of all clients wait for the next group to come back, and join it.

No formula is best everywhere. Where what has come of late is known, a look-ahead shows whether a window, or leaving at once, would
have done better, and that rule holds then (`core.look_ahead`).

Holding control against bunching is from public transport (Daganzo, "A headway-based approach to eliminate
bus bunching", Transportation Research B 43, 2009); the formula for batch servers is ours.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from headway.core.departure import Load, Rule
from headway.core.look_ahead import LookAhead
from headway.core.policies.window import DEFAULT_WINDOW, Window
from headway.core.slot_factors import FACTORS, STEP, USUAL, scale

WORTH_SPACING = 1.0
"""Expected arrivals in a gap (λα/k) below which there is nothing to space, so that a lone request leaves at once."""

SATURATED = 0.8
"""Share of the GPUs' capacity in use above which full batches are spaced, too."""
PACE = 0.95
"""Gaps by which each departure moves the schedule of full batches on; below 1, so that it never limits throughput."""
TOLERANCE = 0.0625
"""Gaps that a full batch may be ahead of that schedule."""
TOLERANCE_DEVIATIONS = 4.0
"""Standard deviations of the batch time that a full batch may be ahead besides."""
SILENCE = 3.0
"""Mean gaps between arrivals after which a silence is no chance any more: of Poisson gaps, 5 % are longer."""

LONGER = 0.3
"""Share by which the gap of α is longer for each relative standard deviation of the batch time: room for late GPUs."""
PRESUMED, PRESUMED_FOR = 0.3, 2.0
"""Relative standard deviation that is presumed at a start, and batches of each GPU until nothing is presumed any more."""
SMALLER = 2.0
"""Likewise, how much less the size of the largest batch counts in a gap: it is large by chance, too."""

WORTH_MORE = 0.95
"""Multiple of the latency without slower slots below which these take part: their batches never come back evenly spaced."""
ROOM = 0.5
"""Standard deviations of a batch's size for which there must be room in a full batch."""
ALIKE = 0.2
"""Standard deviation of the slots' factors below which what waits is shared as if the slots were alike."""
LEAST_SPARE = 0.1
"""Share of what slots can do that the inputs themselves, β, must leave, for these slots to be enough."""

MOMENT = 0.05
"""Part of α for which nobody has come when all have who had their answers together."""
LONGEST_WAIT = 1.5
"""Times of an even part's batch for which too few clients wait for those of another slot."""
LEAST_COMPANY = 0.5
"""Part of an even part of all clients below which they are too few to leave."""
LEAST_GAP = 1e-6
"""Seconds of a gap that holds nobody back; without one, whoever is first would leave alone."""
EVENLY = 1e6
"""Square of more batches than there are slots, into which a unit of size is cut: an even part leaves with each."""


class Team(msgspec.Struct, frozen=True):
    """Slots that take part, the fastest of all.

    Attributes:
        slots: their number.
        speed: batches that they run together in the time of one on a slot of factor 1: Σ 1/fᵢ.
        slowest: factor above which a slot is none of them.
        spread: standard deviation of the factors.
    """

    slots: int
    speed: float
    slowest: float = math.inf
    spread: float = 0.0


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
    """Return the even gap s* in seconds; 0 when arrivals are too few for a gap to gather a second entry.

    Arguments:
        load: load of the model.
        speed: speed of the slots that take part; None where all are alike.
    """
    speed = load.slots if speed is None else speed
    if speed <= 0.0 or load.rate * load.alpha / speed < WORTH_SPACING:
        return 0.0
    saturated = load.batch_seconds(load.max_batch) / speed
    spare = speed - load.beta * load.size_rate
    return min(load.alpha / spare, saturated) if spare > 0.0 else saturated


class Paced:
    """Spaces departures by the headway. `max_wait` in seconds bounds the wait further; None leaves it to the gap."""

    def __init__(self, max_wait: float | None = None) -> None:
        self._window = math.inf if max_wait is None else max_wait
        window = Window(min(DEFAULT_WINDOW, self._window))
        rules = {"paced": self.spaced, "window": window.rule, "eager": _at_once}
        self._ahead = LookAhead(rules, {"paced": self.spaced, "together": self.together, **rules})

    def rule(self, load: Load) -> Rule:
        """Return the rule at this load: that of even gaps, unless a look at what has come of late shows that another does better."""
        past = load.past
        return self._ahead.rule(load, past) if past is not None and past.tells else self.spaced(load)

    def spaced(self, load: Load) -> Rule:
        """Return the rule of even gaps at this load: leave full at the largest batch, otherwise a kth part of a batch time after the last."""
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
        """Return the rule that batches clients together that were answered together, spread about evenly over the slots."""
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
    """Return the rule by which whatever waits leaves when a GPU is free."""
    return Rule(size=load.max_batch, headway=0.0)
