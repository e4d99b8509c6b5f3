"""What a controller publishes, and for how long it takes itself for the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryFleet
from headway.controller.controller import GONE_AFTER, LEADS_FOR, PUBLISH_EVERY, Controller
from headway.core.departure import Load
from headway.core.queue_limits import QueueLimits
from headway.fleet.pace import Pace
from headway.model import Capacity, QueueName
from headway.runtime.counters import BrokerCounts
from headway.runtime.supervisor import Supervisor
from tests.virtual_time import Clock

LIMITS = QueueLimits(3, 8, 0.1, 100)


async def test_a_model_that_is_served_no_longer_loses_its_capacity(clock: Clock) -> None:
    broker = MemoryBroker({"m": LIMITS, "retired": LIMITS}, DeadLetterBox(), BrokerCounts(), clock, lambda: 0.5)
    fleet, supervisor, served = MemoryFleet(clock), Supervisor(), {"m", "retired"}
    controller = Controller("c", broker, fleet, 0.7, clock, Pace(clock))
    controller.models = lambda: served
    controller.start(supervisor)
    await asyncio.sleep(1.0)
    assert {one.model for one in await fleet.capacities()} == {"m", "retired"}
    served.remove("retired")
    await asyncio.sleep(GONE_AFTER - 1.0)
    assert {one.model for one in await fleet.capacities()} == {"m", "retired"}, "it may only be away"
    await asyncio.sleep(2.0)
    assert {one.model for one in await fleet.capacities()} == {"m"}
    await supervisor.stop()


async def test_another_leader_withdraws_what_its_predecessor_has_published_of_a_model_that_is_gone(
    clock: Clock,
) -> None:
    broker = MemoryBroker({"m": LIMITS}, DeadLetterBox(), BrokerCounts(), clock, lambda: 0.5)
    fleet, supervisor = MemoryFleet(clock), Supervisor()
    await fleet.publish(Capacity(model="gone", healthy=1, degraded=0, items_per_second=9.0, usable_per_second=9.0))
    Controller("c", broker, fleet, 0.7, clock, Pace(clock)).start(supervisor)
    await asyncio.sleep(GONE_AFTER + 1.0)
    assert {one.model for one in await fleet.capacities()} == {"m"}
    await supervisor.stop()


async def test_a_controller_that_stood_still_beyond_its_lead_publishes_nothing_of_before(clock: Clock) -> None:
    broker = MemoryBroker({"m": LIMITS}, DeadLetterBox(), BrokerCounts(), clock, lambda: 0.5)
    fleet, supervisor = MemoryFleet(clock), Supervisor()
    stood, loads = 0.0, broker.loads

    async def stand_still() -> Mapping[QueueName, Load]:
        nonlocal stood
        found = await loads()
        stood = LEADS_FOR
        return found

    broker.loads = stand_still  # type: ignore[method-assign]
    controller = Controller("c", broker, fleet, 0.7, lambda: clock() + stood, Pace(clock))
    controller.start(supervisor)
    await asyncio.sleep(0.01)
    led, published = controller.leads, await fleet.capacities()
    await supervisor.stop()
    assert led
    assert not published


async def test_a_controller_that_could_not_renew_its_lead_does_not_take_itself_for_the_leader(clock: Clock) -> None:
    broker = MemoryBroker({"m": LIMITS}, DeadLetterBox(), BrokerCounts(), clock, lambda: 0.5)
    fleet, supervisor = MemoryFleet(clock), Supervisor()
    controller = Controller("c", broker, fleet, 0.7, clock, Pace(clock))
    led = [controller.leads_now]
    controller.start(supervisor)
    await asyncio.sleep(1.0)
    await controller.stop()
    for pause in (0.0, LEADS_FOR - PUBLISH_EVERY - 0.1, PUBLISH_EVERY + 0.2):
        await asyncio.sleep(pause)
        led.append(controller.leads_now)
    assert led == [False, True, True, False]
    assert controller.leads, "nobody has told it otherwise"
    await supervisor.stop()
