"""What a gateway makes an input weigh: its characters, or by the line that the workers report."""

from __future__ import annotations

import asyncio

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.core.queue_limits import QueueLimits
from headway.gateway.fleet_watchers import READ_WORKERS_EVERY, WorkersWatcher
from headway.gateway.served_models import ServedModels
from headway.model import WeightLine, WorkerInfo, WorkerStatus
from headway.runtime.counters import BrokerCounts
from headway.runtime.supervisor import Supervisor
from tests.virtual_time import Clock

WEIGHED = Settings(model="m", max_batch_weight=100, weight="tokens")


def worker(
    line: WeightLine | None, id: str = "gpu-0", model: str = "m", status: WorkerStatus = WorkerStatus.HEALTHY
) -> WorkerInfo:
    return WorkerInfo(worker_id=id, model=model, status=status, weight=line)


def test_inputs_weigh_their_characters_or_nothing_in_particular() -> None:
    chars = ServedModels(["default"], Settings(max_batch_weight=100))
    chars.learn([worker(WeightLine(5.0, 5.0), model="default")])
    assert [chars["default"].weigh(text) for text in ("", "é", "日本", b"[1]")] == [1, 1, 2, 3]
    unbounded = ServedModels(["default"], Settings(weight="tokens"))
    assert [unbounded["default"].weigh(text) for text in ("", "é", "日本")] == [1, 1, 1]


def test_an_input_weighs_its_octets_until_a_worker_knows_better() -> None:
    served = ServedModels(["m"], WEIGHED)
    served.learn([worker(None), worker(WeightLine(1.0, 1.0), model="other")])
    served.learn([worker(WeightLine(1.0, 1.0), status=WorkerStatus.STARTING)])
    assert [served["m"].weigh(text) for text in ("", "a", "日本", b"[1]")] == [1, 1, 6, 3]


def test_the_lines_of_healthy_workers_count_and_the_last_one_stays() -> None:
    served = ServedModels(["m"], WEIGHED)
    served.learn([worker(WeightLine(2.0, 0.2)), worker(WeightLine(4.0, 0.4), "gpu-1"), worker(None, "gpu-2")])
    assert served["m"].weigh("a" * 10) == 6
    served.learn([worker(None)])
    assert served["m"].weigh("a" * 10) == 6


async def test_a_watcher_keeps_the_weights_up_to_date(clock: Clock) -> None:
    broker = MemoryBroker({"m": QueueLimits(3, 8, 0.1, 100)}, DeadLetterBox(), BrokerCounts(), clock, lambda: 0.5)
    served, supervisor = ServedModels(["m"], WEIGHED), Supervisor()
    WorkersWatcher([served], broker, clock).start(supervisor)
    await broker.heartbeat(worker(WeightLine(0.0, 0.5)))
    await asyncio.sleep(READ_WORKERS_EVERY * 1.5)
    assert served["m"].weigh("a" * 10) == 5
    await supervisor.stop()
