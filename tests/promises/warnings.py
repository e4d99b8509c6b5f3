"""Warnings and errors in the logs. A fault or a failing input must explain each of them.

A fault in a process explains that process's lines; a fault in something shared explains any process's lines.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.promises.evidence import Line
from tests.promises.faults import Fault
from tests.promises.operation import History, Violation

AFTER = 10.0
"""Seconds after a fault in which log lines about it may appear: a timeout, and a margin for a busy machine."""
BEFORE = 0.5
"""Seconds by which a line may seem to precede its fault, because the log uses a different clock."""
SHARED = ("redis", "ledger", "connections")
"""Roles whose faults affect all processes."""
DRAINED = " drained"
"""Suffix of the names of drains. They leave other processes without a worker, and explain no other line."""
HOST = ("gpu", "worker", "service")
"""Roles whose faults end batches of a host."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Matches log lines, and names the roles whose faults explain them, in the same process unless the role is SHARED.
    `event` is a prefix of the event, `about` a pattern in the rest of the line. If there are no roles, the load itself
    is the explanation. If `of_others`, faults of other processes may explain it, too."""

    event: str
    about: str = ""
    roles: tuple[str, ...] = ()
    of_others: bool = False


RULES = (
    Rule("batch failed", "a poisonous input"),
    Rule("batch failed", "", HOST),
    Rule("worker process ended", "", HOST),
    Rule("worker process must be killed to end", "", HOST),
    Rule("worker output dropped", "", HOST),
    Rule("worker does not start", "its process died of SIGKILL", HOST),
    Rule("worker keeps dying", "", HOST),
    Rule("probe failed", "", HOST),
    Rule("versions of a model have a weight but no worker", "", ("worker", "gpu"), of_others=True),
    Rule("the broker is out of reach", "", ("redis", "connections", "gateway", "worker", "controller")),
    Rule("the broker does not answer", "", ("redis", "connections")),
    Rule("requests are refused until the broker is back", "", ("redis", "connections", "gateway")),
    Rule("the outcome of a batch could not be handed in", "", ("redis", "connections", "worker")),
    Rule("the ledger is out of reach", "", ("ledger", "gateway", "service")),
    Rule("the ledger retention is out of reach", "", ("ledger", "gateway", "service")),
    Rule("the last records could not be written to the ledger", "", ("ledger",)),
    Rule("the ledger does not answer", "", ("ledger",)),
    Rule("the store", "", ("ledger",)),
    Rule("a bulk job pauses", "", ("ledger",)),
    Rule("bulk jobs are out of reach", "", ("ledger",)),
    Rule("another process took over a bulk job", "", ("ledger", "gateway")),
    # asyncpg causes this if it gives up a connection that it is opening.
    Rule(
        r"Future exception was never retrieved\nfuture: <Future finished exception=ConnectionError('PostgreSQL",
        "",
        ("ledger",),
    ),
    Rule("rereading failed", "did not respond within"),  # On a busy machine, the thread that reads may be delayed.
)
"""Lines that have an explanation. The first rule that matches a line counts."""


def warnings(history: History) -> Iterator[Violation]:
    """Find lines that nothing explains."""
    for line in history.evidence.lines:
        if not any(_explains(rule, line, history.faults) for rule in RULES if _fits(rule, line)):
            story = f"{line.process} at {line.at:.3f}: {line.event} {line.text[:300]}"
            yield Violation("a warning that no fault explains", story)


def _fits(rule: Rule, line: Line) -> bool:
    return line.event.startswith(rule.event) and re.search(rule.about, line.text) is not None


def _explains(rule: Rule, line: Line, faults: list[Fault]) -> bool:
    """Return True if a matching rule finds a fault that explains a line, or needs none."""
    if not rule.roles:
        return True
    return any(
        fault.what.partition(" ")[0] in rule.roles
        and fault.began - BEFORE <= line.at <= (fault.ended or line.at) + AFTER
        and (rule.of_others or not fault.what.endswith(DRAINED))
        and (rule.of_others or fault.whom == line.process or fault.what.startswith(SHARED))
        for fault in faults
    )
