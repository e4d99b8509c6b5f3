"""Subscriptions of a gateway: who waits here for the outcome of a task that was submitted before, here or elsewhere.

A subscription is no request: nothing is counted or recorded when it ends. It ends with the first of its reply, a
refusal, its time, and the departure of who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headway.model import Reply, Subscription

if TYPE_CHECKING:
    from headway.gateway.broker_session import BrokerSession


class PendingSubscription(msgspec.Struct, eq=False):
    """One subscription from its beginning to its end.

    Attributes:
        subscription: subscription as it is handed on.
        deadline: instant until which somebody waits, in seconds.
        session: session over which it goes.
        outcome: outcome of the task; None when the broker has none to tell.
    """

    subscription: Subscription
    deadline: float
    session: BrokerSession
    outcome: asyncio.Future[Reply | None]

    def refreshed(self, now: float) -> Subscription:
        """Subscription with what is left of its time at instant `now`."""
        return msgspec.structs.replace(self.subscription, timeout=self.deadline - now)


class SubscriptionTable(dict[tuple[str, str], PendingSubscription]):
    """All subscriptions that a gateway holds, by tenant and id. The gateway changes it; its sessions read it."""

    def on(self, session: BrokerSession) -> list[PendingSubscription]:
        """All subscriptions that wait for an outcome over a session."""
        return [pending for pending in self.values() if pending.session is session]

    def refreshed(
        self, session: BrokerSession, subscriptions: Sequence[Subscription], now: float
    ) -> list[Subscription]:
        """Subscriptions of `subscriptions` that still wait over a session, with what is left of their time."""
        found = [self.get((one.tenant, one.id)) for one in subscriptions]
        return [
            one.refreshed(now) for one in found if one is not None and one.session is session and one.deadline > now
        ]

    def take(self, session: BrokerSession, reply: Reply) -> bool:
        """Take a reply that came over a session; False when it is to no subscription.

        A failure that comes by a session that the subscription has left changes nothing: the other may do better.
        """
        pending = self.get((reply.tenant, reply.id))
        if pending is None or pending.subscription.nonce != reply.nonce:
            return False
        if pending.session is not session:
            if reply.failure is not None:
                return True
            pending.session.withdraw(pending.subscription.submission)
        self.end(pending.subscription, reply if reply.shared is not None else None)
        return True

    def refuse(self, session: BrokerSession, subscription: Subscription) -> None:
        """End a subscription that a broker refused, unless it has left that broker's session."""
        pending = self.get((subscription.tenant, subscription.id))
        if pending is not None and pending.session is session:
            self.end(subscription)

    def end(self, subscription: Subscription, outcome: Reply | None = None) -> bool:
        """End a subscription with the task's outcome, if it is known; False when it has ended before."""
        pending = self.pop((subscription.tenant, subscription.id), None)
        if pending is None:
            return False
        pending.outcome.set_result(outcome)
        return True
