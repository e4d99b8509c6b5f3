"""Requests with several inputs. Each input becomes a part, and all parts share one outcome.

    submit ──▶ part 0, which pays for all ──┐
          ├──▶ part 1 ──────────────────────┼── all have an output ──▶ the replies, in order
          └──▶ part 2 … ────────────────────┘
                    └── one fails ──▶ that failure; the other parts are abandoned

The parts share the principal, the options and the deadline. Either all of them are let in or none. The gateway checks the first
part on behalf of all: if it is refused, no other part is submitted. The rate limits charge the first part for all.

A few parts are submitted together. Many parts are submitted in slices, which take turns with the slices of other requests. The
deadline includes this wait.

With an idempotency key, the other parts are submitted only once the broker has accepted or answered the first. If two different
requests use the same key, even at two gateways, only the one whose first part arrives first is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from headway import errors
from headway.core import failures, ratelimit, values
from headway.gateway.client_quotas import UNHELD, AnswerRoom
from headway.gateway.gateway import Gateway
from headway.gateway.pending import PART, ReplySink, SeveralInputs
from headway.model import Failure, InferenceRequest, Principal, QueueName, Reply, RequestOptions, Value, added_up
from headway.runtime.request_id import new_id

MOST_INPUTS = 1024  # Maximum number of inputs of one request.
AT_ONCE = 64  # Maximum number of parts submitted in one turn of the event loop.
BYTES_AT_ONCE = 1 << 20  # Once this many bytes have been submitted, the other parts wait for the next turn.
MOST_BODIES = 8  # Maximum total size of the inputs, each with the parameters, as a multiple of the largest body.
LEAST_TIME = 0.001  # Timeout in seconds of a part that has waited for its turn until the deadline.
FEW = 16  # Requests with at most this many parts don't have to wait for a turn.

_RAN, _MARKS = attrgetter("ran"), attrgetter("shared", "kept", "unkept", "tokens")
_UNMARKED = {(None, False, False, None)}  # Marks of plain replies, which needn't be joined.
OF_ALL = (errors.IDEMPOTENCY_CONFLICT, errors.IDEMPOTENCY_MISUSE)  # Failures of the first part that concern all.


class FanOut(ReplySink):
    """One request with several inputs, and the sink of all its parts.

    Arguments:
        request: the request, without its inputs. It isn't a task, and its principal has the limits for the model. The first part
            gets its id and idempotency key. The other parts get keys that clients can't send.
        ended: called once, with all replies in the order of the inputs, or with a single failure. Not called after `abandon`.
        room: room for the outputs; None to take it from the tenant's quota. The caller releases it after writing the answer.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: InferenceRequest,
        inputs: Sequence[Value],
        ended: Callable[[Sequence[Reply]], None],
        room: AnswerRoom | None = None,
    ) -> None:
        self._gateway = gateway
        self._principal, self._model = request.principal, request.model
        self._id, self._options = request.id, request.options
        self._ended: Callable[[Sequence[Reply]], None] | None = ended
        self._places: dict[str, int] = {}  # Positions of the submitted parts, by id.
        self._replies: list[Reply | None] = [None] * len(inputs)
        self._count = self._missing = len(inputs)
        self._several = SeveralInputs(request.id, inputs, request.parameters)
        self._refused = False  # True once the gateway has refused a part. No other part is submitted then.
        self._awaits_first = self._has_to_wait()  # True while the other parts wait for the first.
        self._several.ahead = self._awaits_first or bool(request.options.key)
        self._is_wrong = False  # True if the model isn't served. The request is then charged as a single input.
        self._let_in = 0  # Number of parts that were let in with the first but haven't been submitted yet.
        self._whole = b""
        self._begun = 0.0
        self.room = room or gateway.quotas.answer_room(request.principal.tenant)
        self._bytes = 0  # Bytes of the outputs so far.
        self._failed_part = ""

    def start(self) -> None:
        """Submit the parts. The outcome follows in a later turn of the event loop."""
        count, loop = self._count, asyncio.get_running_loop()
        self._begun = loop.time()
        least = min(self._principal.limits, key=lambda limit: limit.burst, default=None)
        self._is_wrong = self._gateway.absence(self._principal, self._model) is not None
        if self._is_wrong:
            self._submit()
        elif least is not None and (counted := self._counted()) > max(least.burst, 1.0):
            self._turn_away(failures.never_within(least, counted))
        elif failure := too_many_bytes(
            self._several.inputs, self._several.parameters, self._gateway.settings.max_body_bytes
        ):
            self._turn_away(failure)
        elif count > FEW:
            self._wait_turn()
        elif self._awaits_first or not self._enter():
            self._submit()

    def _turn_away(self, failure: Failure) -> None:
        """Refuse the whole request, and charge it as a single input unless that exceeds a limit. The client gets `failure` even
        then, because a Retry-After wouldn't help a request that never fits."""
        gateway, principal = self._gateway, self._principal
        limits = gateway.counted(principal.limits)
        if gateway.limiter.excess(limits, gateway.broker) is None:
            gateway.limiter.charge(limits)
        refused = InferenceRequest(principal, self._id, self._options, self._model)
        reply = gateway.note_refusal(refused, failure)
        asyncio.get_running_loop().call_soon(self._end, [reply])

    def _has_to_wait(self) -> bool:
        """Return True if the first part must be sent ahead: with an idempotency key, or if the parts don't fit into one call."""
        several, count = self._several, self._count
        if count == 1:
            return False
        if self._options.key or count > AT_ONCE:
            return True
        apart = self._gateway.settings.large_payload_bytes
        return bool(apart) and max(map(len, several.inputs)) + len(several.parameters) > apart

    def abandon(self) -> None:
        """Drop all parts and outputs, because the client has left."""
        self._let_go()
        self._replies = []
        self.room.shrink(0)
        self._note(self._failed(failures.left()))

    def _let_go(self) -> None:
        self._ended = None
        self._several.forget_equal()
        if self._missing:
            self._leave([id for id, position in self._places.items() if self._replies[position] is None])
        self._places.clear()
        if self._let_in:
            tier = max(self._principal.tier, self._options.tier)
            self._gateway.limiter.forgo(self._model, self._principal.tenant, tier, self._let_in)
            self._let_in = 0

    def _leave(self, left: Sequence[str]) -> None:
        """Abandon parts, up to AT_ONCE per turn of the event loop."""
        tenant = self._principal.tenant
        for id in left[:AT_ONCE]:
            self._gateway.abandon(self, tenant, id)
        if len(left) > AT_ONCE:
            self._gateway.turns.wait(tenant, lambda: self._leave(left[AT_ONCE:]))

    def answer(self, reply: Reply) -> None:
        if self._ended is None:
            return
        position = self._places[reply.id]
        self._replies[position] = reply
        if reply.failure is not None or reply.output is None:
            self._failed_part = reply.id if position else ""
            self._end([self._failed(self._shown(position, reply), reply)])
            return
        self._bytes += values.room(reply.output)
        if self._bytes > UNHELD and (failure := self.room.hold(self._bytes)) is not None:
            tier = self._gateway.settings.tier_names[max(self._principal.tier, self._options.tier)]
            self._gateway.counters.refusals[failure.reason, tier, self._model] += 1
            self._end([self._failed(failure, reply)])
            return
        self._missing -= 1
        if not self._missing:
            self._end([reply for reply in self._replies if reply is not None])
        elif not position:
            self.admitted()

    def admitted(self) -> None:
        """Submit the other parts, because the broker has accepted or answered the first."""
        if not self._awaits_first:
            return
        self._awaits_first = False
        if self._count <= FEW:
            self._go_on()
        else:
            self._wait_turn()

    def _enter(self) -> bool:
        """Submit all parts together on their lane. Returns False if they can't take the lane."""
        several, gateway, count = self._several, self._gateway, self._count
        lane = gateway.lane(self._principal, self._options, self._model)
        if not lane.open or lane.throttled or not gateway.lets_in(lane, count):
            return False
        id, limits = self._id, ratelimit.all_counting_as(lane.pattern.limits, count)
        pattern = replace(lane.pattern, limits=limits, count=count)
        for position, input in enumerate(several.inputs):
            self._places[id] = position
            entry = gateway.enter(self, lane, id, input, several.parameters, pattern, several)
            if entry is None:
                self._refused = True
                break
            if not position:
                several.payer = entry.nonce
                pattern = replace(lane.pattern, limits=(), payer=entry.nonce)
            id = new_id()
        return True

    def _submit(self) -> None:
        """Submit the next parts, and wait for a turn to submit the others."""
        begin, room = len(self._places), BYTES_AT_ONCE
        end = 1 if self._awaits_first else min(begin + AT_ONCE, self._count)
        for position in range(begin, end):
            if self._ended is None:
                return
            if room <= 0:
                break
            room -= len(self._several.inputs[position]) + len(self._several.parameters)
            id = new_id() if position else self._id
            self._places[id] = position
            payer, options, several = self._payer(position), self._options_of(position), self._several
            part = InferenceRequest(payer, id, options, self._model, several.inputs[position], several.parameters)
            if not self._gateway.submit(self, part, several):
                self._refused = True
                return
            self._let_in = self._let_in - 1 if position else self._count - 1
        if len(self._places) < self._count and not self._awaits_first:
            self._wait_turn()

    def _wait_turn(self) -> None:
        self._gateway.turns.wait(self._principal.tenant, self._go_on)

    def _go_on(self) -> None:
        if self._ended is not None:
            self._submit()

    def _payer(self, position: int) -> Principal:
        """Return the principal for a part. The first part is charged for all."""
        limits = self._principal.limits
        if not limits or self._is_wrong or (counted := 0 if position else self._counted()) == 1:
            return self._principal
        charged = () if position else ratelimit.all_counting_as(limits, counted)
        return replace(self._principal, limits=charged)

    def _counted(self) -> int:
        return self._gateway.served[self._model].counted(self._several.inputs)

    def _options_of(self, position: int) -> RequestOptions:
        options = self._options
        if self._count == 1 and not options.key and not options.task:
            return options
        key = f"{options.key}{PART}{position}" if options.key and position else options.key
        chosen = options.chosen and not position
        count = 0 if position else self._count
        # The input policy may have changed the inputs after the first part.
        if options.key and (position == 0 or (position == 1 and self._several.inspected)):
            self._whole = self._several.digest(QueueName(self._model, options.version))
        left = options.timeout - (asyncio.get_running_loop().time() - self._begun)
        return replace(
            options, timeout=max(left, LEAST_TIME), key=key, whole=self._whole, chosen=chosen, task=False, count=count
        )

    def _shown(self, position: int, reply: Reply) -> Failure:
        """Return a part's failure as the failure of the whole request. It names the input if the input is to blame."""
        failure, count = failures.failure_of(reply), self._count
        if count == 1 or reply.failure is None or failure.code == errors.RATE_LIMITED:
            return failure
        if failure.reason == failures.POLICY:  # The message already names the input.
            return failure
        if not position and (failure.code in OF_ALL or failure.reason == failures.LIST):
            return failure
        if self._refused and len(self._places) == 1:  # The first input was checked on behalf of all.
            return failure
        return failures.of_input(position, count, failure)

    def _failed(self, failure: Failure, reply: Reply | None = None) -> Reply:
        if reply is None:
            return Reply(self._id, self._principal.tenant, None, failure)
        return replace(reply, id=self._id, output=None, failure=failure)

    def _note(self, reply: Reply, failed_part: str = "") -> None:
        self._several.whole.end(reply, asyncio.get_running_loop().time() - self._begun, failed_part)

    def _end(self, replies: Sequence[Reply]) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            failed = replies[0].failure is not None
            self._note(joined(self._id, replies), self._failed_part if failed else "")
            self._let_go()
            self._replies = []
            if failed:
                self.room.shrink(0)
            ended(replies)


def too_many_bytes(inputs: Sequence[Value], parameters: bytes, most_body: int) -> Failure | None:
    """Return a failure if several inputs have too many bytes in total. `most_body`: maximum size of a body in bytes."""
    count, total, most = len(inputs), sum(map(len, inputs)), MOST_BODIES * most_body
    if count == 1 or total + count * len(parameters) <= most:
        return None
    message = (
        f"{count} inputs come to {total} bytes, plus {count} times {len(parameters)} bytes of parameters, which are sent with each; "
        f"at most {most} are allowed in one request ({MOST_BODIES} times max_body_bytes). Send fewer inputs at a time"
    )
    return Failure(errors.PAYLOAD_TOO_LARGE, message)


def joined(id: str, replies: Sequence[Reply]) -> Reply:
    """Join replies into one with the first output or the failure. It is marked as shared if all replies are shared. Its run names
    all versions that answered, such as `3,4`: the version may change between parts, and some outcomes may be older."""
    first = replies[0]
    if (
        len(replies) == 1
        or first.failure is not None
        or (first.id == id and set(map(_MARKS, replies)) == _UNMARKED and len({*map(_RAN, replies)}) == 1)
    ):
        return first
    alike, ran = all(reply.shared is first.shared for reply in replies), first.ran
    versions = dict.fromkeys(reply.ran.version for reply in replies if reply.ran is not None)
    if ran is not None and len(versions) > 1:
        ran = replace(ran, version=",".join(filter(None, versions)))
    return replace(
        first,
        id=id,
        ran=ran,
        shared=first.shared if alike else None,
        kept=all(reply.kept for reply in replies),
        unkept=any(reply.unkept for reply in replies),
        tokens=added_up([reply.tokens for reply in replies]),
    )
