"""`paced`: evenly spaced departures, the default.

With a fixed batch time, "leave whenever a GPU is free" makes GPUs bunch like buses on a line: one leaves full, and the next follows it
nearly empty. An even gap between departures needs no more GPUs, and cuts the longest wait from a whole batch time to one gap. With batch
time ℓ(n) = α + βn, k GPUs and arrival rate λ, each departure carries n = λs, and k departures must fit into one batch time, k·s = α + βλs:

    s* = α / (k − βλ)

Saturation. If all batches are full, GPUs that become free together would always leave together, each with what the others left
behind. So a full batch only leaves once a schedule has reached it. Each departure moves the schedule on by PACE gaps, which is
faster than the GPUs, so spacing costs no throughput. A batch may be as far ahead of the schedule as batch times vary by chance. (A
leaky bucket as a meter: the virtual scheduling of ITU-T I.371.)

The actual gap. The formula leaves no slack. If larger batches take longer, a batch that is large by chance comes back late, the
next is larger still, and gaps bunch again. And after idle time, the first gaps would be too long. So the gap is ℓ(n)/k for the
largest batch n on a GPU, the pace at which GPUs are then coming back. This gap converges to s*: λ·ℓ(n)/k arrivals come in it, and
n = λs* is the fixed point. At the start, batches are too few and small for that. So the first batch of each GPU leaves s* after the
one before, and is not cut.

Varying batch times. GPUs come back at uneven times, and the largest batch is partly large by chance. So the part of the gap due to α
is made somewhat longer, and the part due to the size shorter. A single GPU needs no spacing, and only waits for a few more entries.

Different slots. k slots handle Σ 1/fᵢ times as much as one of factor 1, and an even gap would hold the fast slots back. A
request waits for a gap, then a batch: gᵢ + ℓᵢ. The longest of these sums is shortest if all are the same, gᵢ = C − ℓᵢ. A batch
leaves each slot every ℓᵢ, and the gaps fill all time, so Σ gᵢ/ℓᵢ = 1 and C = (k + 1) / Σ 1/ℓᵢ. A slot with ℓᵢ ≥ C would make C
longer, so it takes no part, and only helps out. So the k fastest slots take part, and k is chosen such that (k + 1)·s* is
smallest, where s* is the mean gap. The arrivals of such a gap must fit into a batch, with some room for chance.

Cutting. Clients that ask again once answered come back together. They would run in one batch for ever while other GPUs are idle, or
alternate between a large batch and small ones. So if the waiting entries are well over an even share (everything that waits or runs,
divided by k), they are cut. If they leave in j batches a gap apart, the mean time until n are back is (α + βn/j)·(1 + (j−1)/2k),
which is smallest at the integer closest to √(βn·(2k−1)/α). The entries are cut into no more batches than that.

Bursts. The gap since the last departure says little: the first request of a burst would take a GPU for itself while the others
wait. So if a request comes late in a gap in which others were expected, it gets a gap of its own to gather a batch. This is the
gap of idle GPUs, α/k, and it ends early if no other request follows. Poisson arrivals are hardly affected.

Waiting clients, who ask again once answered, are served best in fixed groups, one on each slot. Then no client waits for a GPU,
and no GPU waits for a client. So their rule keeps no gap. A moment after a batch has come back, its clients have asked again,
and their next batch leaves. But a group that has less than half of an even share of all clients waits for the next group to
come back, and joins it.

No formula is best everywhere. From recent arrivals, a look-ahead determines whether a window, or leaving immediately, would have
done better, and then uses that rule (`core.look_ahead`).

Holding vehicles against bunching is known from public transport (Daganzo, "A headway-based approach to eliminate bus bunching",
Transportation Research B 43, 2009); the formula for batch servers is ours."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from headway.core.departure import Load, Rule
from headway.core.look_ahead import LookAhead
from headway.core.slot_factors import FACTORS, STEP, USUAL, scale

DEFAULT_WINDOW = 0.040  # Default seconds that the policy `window` waits, and that `pid` aims at.

LIGHT, NORMAL, HEAVY = (16, 0.030), (32, 0.050), (64, 0.100)  # Rows of `table`: batch size and window in seconds.

KP, KI, KD = 0.3, 0.1, 0.05  # Gains of `pid`.


def _rule(load: Load, window: float, size: int) -> Rule:
    size = min(size, load.max_batch)
    return Rule(size=size, window=window, rate=load.rate, service=load.batch_seconds(size))


class Window:
    """`window`: waits at most `max_wait` seconds. The usual rule of batching servers."""

    def __init__(self, max_wait: float) -> None:
        self._window = max_wait

    def rule(self, load: Load) -> Rule:
        size = load.max_batch  # Doesn't use `_rule`, because a call would exceed the bytecode budget for a list.
        return Rule(size=size, window=self._window, rate=load.rate, service=load.batch_seconds(size))


class Table:
    """`table`: three fixed pairs of batch size and window, chosen by load. A predictable baseline.

    below 50 % busy and fewer than 10 waiting   16 / 30 ms
    above 85 % busy or more than 100 waiting    64 / 100 ms
    otherwise                                   32 / 50 ms"""

    def rule(self, load: Load) -> Rule:
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
        """Return the rule with the current window. The window changes once per departure, however often this is called."""
        if load.departures != self._seen:
            self._seen = load.departures
            last, before = self._errors
            error = self._target - load.wait
            step = KP * (error - last) + KI * error + KD * (error - 2 * last + before)
            self._window = min(max(self._window + step, 0.0), 2 * self._target)
            self._errors = (error, last)
        return _rule(load, self._window, load.max_batch)


WORTH_SPACING = 1.0  # With fewer expected arrivals in a gap (λα/k), a request leaves immediately, without spacing.

SATURATED = 0.8  # Share of the GPUs' capacity in use above which even full batches are spaced.
PACE = 0.95  # Gaps by which each departure moves the schedule of full batches on. Below 1, so that it never limits throughput.
TOLERANCE = 0.0625  # Gaps by which a full batch may be ahead of that schedule.
TOLERANCE_DEVIATIONS = 4.0  # Standard deviations of the batch time by which it may be ahead in addition.
SILENCE = 3.0  # A silence of this many mean gaps between arrivals isn't chance: only 5 % of Poisson gaps are longer.

LONGER = 0.3  # How much the part of a gap due to α grows with the relative standard deviation of the batch time.
PRESUMED, PRESUMED_FOR = 0.3, 2.0  # The relative deviation assumed at first, and batches per GPU until it is ignored.
SMALLER = 2.0  # How much the part due to the largest batch shrinks with that deviation: its size is partly chance.

WORTH_MORE = 0.95  # Slower slots take part only if they bring latency below this share of what it is without them.
ROOM = 0.5  # Standard deviations of a batch's size for which a full batch must have room.
ALIKE = 0.2  # If the slots' factors have a smaller standard deviation, waiting entries are shared out as if slots were alike.
LEAST_SPARE = 0.1  # Slots are enough if the inputs themselves (β) leave more than this share of their capacity unused.

MOMENT = 0.05  # Clients answered together have all come back if no request has arrived for this part of α.
LONGEST_WAIT = 1.5  # How long too few clients wait for another slot's clients, in batch times of an even part.
LEAST_COMPANY = 0.5  # Clients are too few to leave if they are less than this share of an even part of all clients.
LEAST_GAP = 1e-6  # A gap in seconds that is too short to matter. With none, the first client would leave alone.
EVENLY = 1e6  # Value of `Rule.split` that gives more batches than slots, so that every batch is an even part.


class Team(msgspec.Struct, frozen=True):
    """The slots that take part, which are the fastest ones."""

    slots: int  # Number of slots.
    speed: float  # Batches that all of them run in the time in which a slot of factor 1 runs one: Σ 1/fᵢ.
    slowest: float = math.inf  # A slot with a larger factor takes no part.
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
    """Return the even gap s* in seconds, or 0 if a gap has too few arrivals. `speed` is that of the slots that take part."""
    speed = load.slots if speed is None else speed
    if speed <= 0.0 or load.rate * load.alpha / speed < WORTH_SPACING:
        return 0.0
    saturated = load.batch_seconds(load.max_batch) / speed
    spare = speed - load.beta * load.size_rate
    return min(load.alpha / spare, saturated) if spare > 0.0 else saturated


class Paced:
    """Spaces departures by the headway. If given, `max_wait` is an additional limit in seconds."""

    def __init__(self, max_wait: float | None = None) -> None:
        self._window = math.inf if max_wait is None else max_wait
        window = Window(min(DEFAULT_WINDOW, self._window))
        rules = {
            "paced": self.spaced,
            "window": window.rule,
            "eager": lambda load: Rule(size=load.max_batch, headway=0.0),
        }
        self._ahead = LookAhead(rules, {"paced": self.spaced, "together": self.together, **rules})

    def rule(self, load: Load) -> Rule:
        """Return the rule of even gaps, unless the look-ahead has found a better rule for recent arrivals."""
        past = load.past
        return self._ahead.rule(load, past) if past is not None and past.tells else self.spaced(load)

    def spaced(self, load: Load) -> Rule:
        """Return the rule that spaces departures evenly: a batch leaves once it is full, or once the k-th part of a batch's run
        time has passed since the last departure, for k GPUs."""
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
        """Return a rule that keeps clients that were answered together in one group. Groups are about even across the slots."""
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
