"""CPU time of the input policy for one request: `python bench/cost/input_policy.py`, some seconds.

Each line is one kind of input through one set of rules, in microseconds of CPU; `submit` is the whole of what a gateway does with
a request until it is handed on, without a policy and with all rules but the function.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.core.input_policy import CHARACTERS, InputRule, Screen, Search
from headway.core.queue_limits import QueueLimits
from headway.gateway.gateway import Gateway
from headway.gateway.input_gate import InputGate, InputPolicy
from headway.gateway.pending import NOBODY
from headway.input_policy.file import search_for
from headway.model import InferenceRequest, Principal, RequestOptions, Value
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id

FORMS = InputRule(name="forms", normalise="NFKC")
UNSEEN = InputRule(name="unseen", characters=tuple(CHARACTERS))
RUNS = InputRule(name="runs", longest_run=400)
WORDS = InputRule(
    name="words",
    patterns=(
        r"(?i)\bignore\s+(all\s+)?(the\s+)?(previous|above)\s+instructions\b",
        r"(?i)\byou\s+are\s+now\s+(in\s+)?(developer|dan)\s+mode\b",
        r"(?i)\b(reveal|print|show)\s+(me\s+)?(your|the)\s+(system\s+)?prompt\b",
        r"(?i)<\|?(im_start|im_end|system)\|?>",
    ),
)
ENGLISH = "The quick brown fox jumps over the lazy dog, and asks what it is called. "
GERMAN = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
HINDI = "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। "
TEXTS = {
    "English, 100 characters": ENGLISH * 2,
    "English, 4 kB": ENGLISH * 56,
    "English, 1 MB": ENGLISH * 14_000,
    "German, 4 kB": GERMAN * 60,
    "Hindi, 4 kB": HINDI * 28,
    "Hindi, 1 MB": HINDI * 7_000,
}


def cpu(act: Callable[[], object], seconds: float = 0.1) -> float:
    """Least CPU time of one call in µs, over some rounds."""
    act()
    best, rounds = float("inf"), 0
    until = time.process_time() + seconds
    while time.process_time() < until or rounds < 3:
        many = max(1, min(1000, int(2e4 / best) if best < float("inf") else 1))
        begun = time.process_time()
        for _ in range(many):
            act()
        best = min(best, (time.process_time() - begun) / many * 1e6)
        rounds += 1
    return best


def main() -> None:
    search = search_for(WORDS.patterns)
    sets = {
        "unseen, NFKC": (FORMS, UNSEEN),
        "run": (RUNS,),
        "4 patterns": (WORDS,),
        "all": (FORMS, UNSEEN, RUNS, WORDS),
    }
    screens = {name: Screen(rules, {"words": search}) for name, rules in sets.items()}
    inputs: dict[str, Value] = {name: text[: int(1e6)] for name, text in TEXTS.items()}
    inputs["English, 100 characters"] = (ENGLISH * 2)[:100]
    inputs["JSON, 4 kB, 50 texts"] = json.dumps([f"{number} {ENGLISH}" for number in range(50)]).encode()
    print(f"{'µs of CPU':28}", *(f"{name:>14}" for name in screens))
    for name, value in inputs.items():
        found = (cpu(lambda screen=screen, value=value: screen.value(value, set())) for screen in screens.values())  # type: ignore[misc]
        print(f"{name:28}", *(f"{one:14.1f}" for one in found))
    asyncio.run(submits({"words": search}))


async def submits(searches: dict[str, Search]) -> None:
    settings, counters = Settings(), Counters()
    broker = MemoryBroker(
        {"m": QueueLimits(tiers=3, max_batch=32)}, DeadLetterBox(), counters.broker, time.monotonic, lambda: 0.5
    )
    policy = InputPolicy((FORMS, UNSEEN, RUNS, WORDS), searches, {}, settings.tier_names, ["m"])
    gateways = {
        "off": Gateway(settings, ["m"], broker, counters.gateway, time.monotonic),
        "on": Gateway(
            settings, ["m"], broker, counters.gateway, time.monotonic, gate=InputGate(policy, counters.input_policy)
        ),
    }
    ann, options, text = Principal("ann", "acme", 1), RequestOptions(4.0), (ENGLISH * 2)[:100]
    for name, gateway in gateways.items():

        def one(gateway: Gateway = gateway) -> None:
            id = new_id()
            gateway.submit(NOBODY, InferenceRequest(ann, id, options, "m", text, b""))
            gateway.abandon(NOBODY, "acme", id)
            gateway._session.give_up()

        print(f"submit, 100 characters, policy {name:4} {cpu(one):10.1f}")


if __name__ == "__main__":
    main()
