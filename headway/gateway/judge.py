"""The judge runs a policy's function in separate processes, to decide for each text whether the model may get it.

    asked ──▶ waits in its caller's queue ──▶ called, with other texts of this caller ──▶ verdict
                       │ deadline                      │ hangs, crashes, raises, returns something else
                       ▼                               ▼
                 no verdict: busy               called again alone ──▶ no verdict: failed

The function gets a list of texts and returns one boolean for each. A process that hangs or dies is replaced.

Callers take turns, and each may use only part of the queue. If a caller's text makes a process hang or die, the caller is
paused for nine times as long as the failure took, so it can waste at most a tenth of a process's time. Texts that arrive during
the pause get no verdict. The policy's rule says what happens to requests without a verdict."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headway.core import values
from headway.core.input_policy import InputRule
from headway.core.retry import backoff
from headway.errors import BackendError, BatchTimeout, TargetError, WorkerAbsent, WorkerCrashed
from headway.model import WARM_UP, Entry, Value
from headway.ports import Backend
from headway.runtime.logger import get_logger
from headway.runtime.race import race
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

AT_ONCE = 16  # Maximum number of texts in one call.
ROOM = 4096  # Maximum number of waiting texts.
ROOM_OF_CALLER = 1024  # Maximum number of waiting texts of one caller.
ROOM_IN_CHARS = 64 << 20  # Maximum number of waiting characters.
SHARE = 9.0  # Length of a caller's pause, as a multiple of the time that its text wasted.
PROBE_WITHIN = 30.0  # Time limit in seconds for the trial call of a new process.
LOG_EVERY = 10.0  # Minimum seconds between log lines about failures of the function.
MOST_PAUSED = 1000  # Number of paused callers above which expired pauses are dropped.
CallerId = tuple[str, str]  # Tenant, and user or address.


class Verdict(enum.Enum):
    """Verdict on a text."""

    LET_IN = "let in"
    REFUSED = "refused"
    FAILED = "failed"  # The function failed on this text.
    BUSY = "busy"  # The function wasn't called in time.


OnVerdict = Callable[[Verdict, int], None]  # Called with the verdict and the position of the decisive text.


class Question:
    """The texts of one request, at least one, that wait for a verdict. `on_verdict` is called once, in a later turn of the
    event loop. `wanted` returns True while anyone is waiting for the verdict. `called` is True once the function has been
    called with one of the texts."""

    __slots__ = ("_missing", "_on_verdict", "called", "caller", "size", "texts", "timer", "wanted")

    def __init__(
        self, caller: CallerId, texts: Sequence[str], on_verdict: OnVerdict, wanted: Callable[[], bool]
    ) -> None:
        self.caller, self.texts, self.wanted = caller, texts, wanted
        self.size = sum(map(len, texts))
        self.timer: asyncio.TimerHandle | None = None
        self.called = False
        self._on_verdict: OnVerdict | None = on_verdict
        self._missing = len(texts)

    @property
    def open(self) -> bool:
        """True while the verdict is wanted but not known yet."""
        return self._on_verdict is not None and self.wanted()

    def take(self, verdict: Verdict, position: int) -> None:
        """Record the verdict on one text. The first refused text decides the whole request."""
        self._missing -= 1
        if verdict is Verdict.LET_IN and self._missing:
            return
        on_verdict, self._on_verdict = self._on_verdict, None
        if self.timer is not None:
            self.timer.cancel()
        if on_verdict is not None:
            on_verdict(verdict, position)

    def expire(self) -> None:
        """End the question as BUSY if no process became free before its deadline."""
        if not self.called:
            self.take(Verdict.BUSY, 0)


_Piece = tuple[Question, int]  # One text of a question, by its position.


class Judge:
    """The judge for one rule that has a function. `make` builds the backend of a process, given the process's number. The
    backend's target is the function. `restarted` is called with the rule's name after a process has been replaced."""

    def __init__(
        self,
        rule: InputRule,
        make: Callable[[int], Backend],
        clock: Callable[[], float],
        rng: Callable[[], float],
        restarted: Callable[[str], None],
    ) -> None:
        self.rule = rule
        self._deadline = rule.deadline_ms / 1000
        self._clock, self._rng, self._restarted = clock, rng, restarted
        self._backends = [make(number) for number in range(rule.processes)]
        self._lines: OrderedDict[CallerId, deque[_Piece]] = OrderedDict()
        self._waiting = self._chars = 0
        self._paused: dict[CallerId, float] = {}  # When the pause of each caller ends.
        self._news = asyncio.Event()
        self._retired = False
        self._serving = 0  # Number of processes that may still get texts.
        self._failures, self._logged_at = 0, -LOG_EVERY

    @property
    def over(self) -> bool:
        """True once the judge has retired and its processes have exited."""
        return self._serving == 0 and self._retired

    async def open(self) -> None:
        """Start the processes, and try the function. If it doesn't work, stop them and raise TargetError."""
        try:
            for backend in self._backends:
                await self._start(backend)
        except BaseException:
            await self.close()
            raise

    def start(self, supervisor: Supervisor) -> None:
        """Start a loop for each process. The loops end once the judge has retired."""
        self._serving = len(self._backends)
        for number, backend in enumerate(self._backends):
            supervisor.start(f"input policy {self.rule.name} {number}", partial(self._serve, backend))

    def retire(self) -> None:
        """Answer the waiting questions, then stop the processes. Don't call `ask` afterwards."""
        self._retired = True
        self._news.set()

    async def close(self) -> None:
        for backend in self._backends:
            await backend.stop()

    def ask(self, question: Question) -> bool:
        """Queue a question. Returns False if there is no room or the caller is paused; `on_verdict` isn't called then."""
        caller, line = question.caller, self._lines.get(question.caller)
        own = len(line) if line is not None else 0
        full = self._waiting + len(question.texts) > ROOM or self._chars + question.size > ROOM_IN_CHARS
        if self._is_paused(caller) or (own and own + len(question.texts) > ROOM_OF_CALLER) or (self._waiting and full):
            return False
        if line is None:
            line = self._lines[caller] = deque()
        line.extend((question, position) for position in range(len(question.texts)))
        self._waiting += len(question.texts)
        self._chars += question.size
        question.timer = asyncio.get_running_loop().call_later(self._deadline, question.expire)
        self._news.set()
        return True

    def _is_paused(self, caller: CallerId) -> bool:
        if self._paused.get(caller, -math.inf) > self._clock():
            return True
        self._paused.pop(caller, None)
        return False

    def _next(self) -> list[_Piece]:
        """Return up to AT_ONCE texts of the next caller. Drops texts that nobody is waiting for any more."""
        while self._lines:
            caller, line = self._lines.popitem(last=False)
            taken: list[_Piece] = []
            while line and len(taken) < AT_ONCE:
                question, position = line.popleft()
                self._waiting -= 1
                self._chars -= len(question.texts[position])
                if question.open:
                    question.called = True
                    taken.append((question, position))
            if line:
                self._lines[caller] = line
            if taken:
                return taken
        return []

    async def _serve(self, backend: Backend) -> None:
        """Judge texts in one process until the judge has retired and no text is waiting."""
        while True:
            if pieces := self._next():
                await self._judge(backend, pieces)
            elif self._retired:
                await backend.stop()
                self._serving -= 1
                return
            else:
                self._news.clear()
                _, gone = await race(self._news.wait(), backend.gone())
                if gone is not None:  # The process died while idle.
                    await self._replace(backend)

    async def _judge(self, backend: Backend, pieces: Sequence[_Piece]) -> None:
        """Call the function with texts from one caller. If that fails, call it again with each text separately."""
        caller = pieces[0][0].caller
        if self._is_paused(caller):
            _tell(pieces, [Verdict.BUSY] * len(pieces))
            return
        begun = self._clock()
        verdicts, ended = await self._call(backend, [question.texts[position] for question, position in pieces])
        if len(pieces) > 1 and Verdict.FAILED in verdicts:
            if ended:
                await self._replace(backend)
            for piece in pieces:
                if piece[0].open:
                    await self._judge(backend, [piece])
            return
        if not ended:
            _tell(pieces, verdicts)
            return
        self._pause(caller, self._clock() - begun)
        _tell(pieces, verdicts)
        await self._replace(backend)
        self._pause(caller, self._clock() - begun)

    async def _call(self, backend: Backend, texts: Sequence[str]) -> tuple[Sequence[Verdict], bool]:
        """Return the verdicts of one call, and True if the process died during the call."""
        for _ in range(2):
            try:
                items = await backend.run([_entry(text, self._deadline) for text in texts], self._deadline)
            except WorkerAbsent:  # The process had already exited, and never saw the texts.
                await self._replace(backend)
            except BackendError as exc:
                self._log(exc)
                return [Verdict.FAILED] * len(texts), isinstance(exc, BatchTimeout | WorkerCrashed)
            else:
                return [_VERDICTS.get(item.output, Verdict.FAILED) for item in items], False
        return [Verdict.BUSY] * len(texts), False

    def _pause(self, caller: CallerId, spent: float) -> None:
        now = self._clock()
        if len(self._paused) >= MOST_PAUSED:
            self._paused = {paused: until for paused, until in self._paused.items() if until > now}
        self._paused[caller] = now + SHARE * spent

    def _log(self, error: BackendError) -> None:
        now = self._clock()
        self._failures += 1
        if now >= self._logged_at + LOG_EVERY:
            timed_out = f"it took longer than {self.rule.deadline_ms:g} ms"
            shown = timed_out if isinstance(error, BatchTimeout) else error.shown
            log.warning("the input policy's function fails", rule=self.rule.name, error=shown, times=self._failures)
            self._failures, self._logged_at = 0, now

    async def _start(self, backend: Backend) -> None:
        """Start a process, and try the function on one text. Raises TargetError if it doesn't work."""
        await backend.start()
        try:
            [item] = await backend.run([_entry(WARM_UP, PROBE_WITHIN)], PROBE_WITHIN)
        except BackendError as exc:
            raise TargetError(f"the function fails on {WARM_UP!r}: {exc}") from None
        if item.output not in _VERDICTS:
            problem = item.error or f"it returned {values.shown(item.output or '')[:100]} for {WARM_UP!r}"
            raise TargetError(f"the function does not return a boolean: {problem}")

    async def _replace(self, backend: Backend) -> None:
        """Restart a process, retrying until it works. A retired judge tries only once."""
        failures = 0
        while True:
            try:
                await self._start(backend)
                self._restarted(self.rule.name)
                return
            except TargetError as exc:
                failures += 1
                if failures == 1:
                    log.error("the input policy's function does not start", rule=self.rule.name, error=str(exc))
                if self._retired:
                    return
            await asyncio.sleep(backoff(failures, self._rng()))


_VERDICTS: Mapping[Value | None, Verdict] = {b"true": Verdict.LET_IN, b"false": Verdict.REFUSED}  # By JSON result.


def _entry(text: str, timeout: float) -> Entry:
    return Entry(WARM_UP, "", text, 0, "", "", timeout, timeout)


def _tell(pieces: Sequence[_Piece], verdicts: Sequence[Verdict]) -> None:
    for (question, position), verdict in zip(pieces, verdicts, strict=True):
        question.take(verdict, position)
