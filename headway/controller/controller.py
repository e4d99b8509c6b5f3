"""The controller: publishes the capacity of each model's workers, and how many there should be. Of many, one leads.

follow ──lead is free──▶ lead ──not renewed in time──▶ follow
         (asked twice a second)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog

from headway.controller.autoscaler import Autoscaler
from headway.core.capacity import capacity
from headway.core.departure import Load
from headway.core.health import OFFLINE_AFTER
from headway.errors import BrokerUnavailable
from headway.model import Capacity, model_and_version
from headway.ports import Broker, Fleet
from headway.runtime.periodic import Periodic
from headway.runtime.supervisor import Supervisor

log = structlog.get_logger(__name__)

PUBLISH_EVERY = 0.5
"""Seconds between two publications. The limits made from them are older by that, beside the heartbeats."""
GONE_AFTER = OFFLINE_AFTER
"""Seconds for which neither a worker nor a setting has named a model before its capacity is withdrawn."""
LEADS_FOR = 3.0
"""Seconds for which a leader leads unless it renews that, which it does with each publication."""


class Controller:
    """Controller of one process. It leads if no other does, and publishes capacities while it leads.

    Arguments:
        id: id of its process in the fleet.
        broker: broker that knows workers and loads.
        fleet: fleet that knows the leader, and gets the capacities.
        target_utilisation: share of the measured capacity above which the lowest tier is held back, 0 to 1.
        clock: monotonic seconds.
        alone: whether there can be no other controller, so that the lead is nothing to tell of.

    Attributes:
        leads: whether it led when it last asked.
        autoscaler: decides how many workers there should be while the controller leads; None: nobody does.
        models: names of the models that the fleet serves besides those of its workers; None: all that the broker knows.
    """

    def __init__(
        self,
        id: str,
        broker: Broker,
        fleet: Fleet,
        target_utilisation: float,
        clock: Callable[[], float],
        *,
        alone: bool = False,
    ) -> None:
        self.leads = False
        self.autoscaler: Autoscaler | None = None
        self.models: Callable[[], Collection[str]] | None = None
        self._clock = clock
        self._led_until = -math.inf
        self._say = log.debug if alone else log.info
        self._id = id
        self._broker = broker
        self._fleet = fleet
        self._target_utilisation = target_utilisation
        self._published: dict[str, float] = {}
        """Instants of the last publications, by model."""
        self._told: dict[str, bool] = {}
        """Whether what was logged last of a model's capacity was an estimate."""
        self._periodic = Periodic("controller", self._control, clock, every=PUBLISH_EVERY)

    @property
    def leads_now(self) -> bool:
        """Whether no other controller can lead now: the lead that it got has not run out since."""
        return self.leads and self._clock() < self._led_until

    def start(self, supervisor: Supervisor) -> None:
        """Start to ask for the lead."""
        self._periodic.start(supervisor)
        if self.autoscaler is not None:
            self.autoscaler.start(supervisor)

    async def stop(self) -> None:
        """Stop asking. The lead itself is given up when its process leaves the fleet."""
        if self.autoscaler is not None:
            await self.autoscaler.stop()
        await self._periodic.stop()

    async def _control(self) -> None:
        try:
            until = self._clock() + LEADS_FOR
            led = self.leads
            self._become(await self._fleet.acquire_leadership(self._id, LEADS_FOR))
            self._led_until = until
            if self.leads and not led:
                self._begin(await self._fleet.capacities())
            if self.leads:
                if self.autoscaler is not None:
                    self.autoscaler.leads_until = until
                await self._publish()
        except BrokerUnavailable:
            self._become(leader=False, known=False)  # Another may lead before we hear of it.
            raise

    def _begin(self, published: Sequence[Capacity]) -> None:
        """Begin to lead, from what was published last."""
        self._published = dict.fromkeys((one.model for one in published), self._clock())
        if self.autoscaler is not None:
            self.autoscaler.begin(published)

    async def _publish(self) -> None:
        workers, loads = await self._broker.workers(), await self._broker.loads()
        target, scarce = self._target_utilisation, self._broker.memory_pressure
        of_models: dict[str, Load] = {}
        rates: dict[str, float] = {}
        for queue, load in loads.items():
            # Versions of a model mostly cost alike; that which has run most is known best.
            model, _ = model_and_version(queue)
            rates[model] = rates.get(model, 0.0) + load.rate
            if model not in of_models or load.departures > of_models[model].departures:
                of_models[model] = load
        served = of_models if self.models is None else of_models.keys() & set(self.models())
        found = [
            capacity(model, workers, of_models.get(model), target, scarce)
            for model in sorted({*served, *(worker.model for worker in workers)})
        ]
        if self.autoscaler is not None:
            depths, members = await self._broker.depths(), await self._fleet.members()
            asked = {model: replace(load, rate=rates[model]) for model, load in of_models.items()}
            found = [
                self.autoscaler.look(
                    one,
                    asked.get(one.model),
                    sum(depth.depth for depth in depths if depth.model == one.model),
                    workers,
                    members,
                )
                for one in found
            ]
        self._told = {model: told for model, told in self._told.items() if model in {one.model for one in found}}
        for one in found:
            if not self.leads_now:  # It stood still, and another may lead meanwhile.
                return
            await self._fleet.publish(one)
            self._published[one.model] = self._clock()
            self._tell(one)
        await self._withdraw({one.model for one in found})

    async def _withdraw(self, there: Collection[str]) -> None:
        """Withdraw the capacities of models that are gone."""
        for model, at in [*self._published.items()]:
            if model not in there and self._clock() - at >= GONE_AFTER and self.leads_now:
                await self._fleet.withdraw_capacity(model)
                del self._published[model]
                self._told.pop(model, None)
                if self.autoscaler is not None:
                    self.autoscaler.drop(model)

    def _tell(self, found: Capacity) -> None:
        """Log a capacity when it becomes known, and when it becomes an estimate or sure."""
        if found.items_per_second and self._told.get(found.model) is not found.estimated:
            self._told[found.model] = found.estimated
            log.info(
                "capacity is estimated" if found.estimated else "capacity is measured",
                model=found.model,
                items_per_second=round(found.items_per_second, 1),
                workers=found.healthy,
            )

    def _become(self, leader: bool, known: bool = True) -> None:
        """Note whether this controller leads. `known`: whether another leads if it does not."""
        if not leader and self.autoscaler is not None:
            (self.autoscaler.forget if known else self.autoscaler.interrupt)()
        if leader is not self.leads:
            self.leads = leader
            self._say("leads the fleet" if leader else "no longer leads the fleet", controller=self._id)
