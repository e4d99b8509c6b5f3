"""Receipts for replies that gateways have read. They are usually reported to the server together with the next enqueue.

Until a reply is reported as read, the server recognizes its submission if it is offered again. After the report, the submission
would count as new. So a receipt waits for running calls that offer one of its submissions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.errors import BrokerUnavailable
from headway.model import Entry, Submission
from headway.runtime.race import end

READ_DELAY = 0.05  # Maximum delay in seconds of a report to the server.
NOTHING_READ = ("", "", 0, 0)  # Empty packed receipt.


class Receipt(msgspec.Struct, frozen=True):
    """Report of the replies that a gateway has read from its stream.

    Attributes:
        last: id of the last stream entry.
        outputs: for each separately stored output, its token followed by the name of the submission that has read it.
        held_by: running calls that the receipt must wait for.
    """

    gateway: str
    last: bytes
    submissions: list[Submission]
    outputs: list[bytes] = msgspec.field(default_factory=list)
    held_by: list[Offer] = msgspec.field(default_factory=list)

    @property
    def packed(self) -> tuple[object, ...]:
        pack = wire.NONCE.pack
        names = [pack(nonce) + f"{tenant}\0{id}".encode() for tenant, id, nonce in self.submissions]
        return self.gateway, self.last, len(names), len(self.outputs), *names, *self.outputs

    def and_then(self, later: Receipt) -> Receipt:
        # A large output may have been read after later entries.
        last = max(self.last, later.last, key=lambda id: [int(number) for number in id.split(b"-")])
        submissions, outputs = self.submissions + later.submissions, self.outputs + later.outputs
        return Receipt(self.gateway, last, submissions, outputs, self.held_by + later.held_by)


class Offer:
    """Running call that offers entries."""

    __slots__ = ("entries", "over")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.over = False


class Offers:
    """Running calls of this process that offer entries."""

    def __init__(self) -> None:
        self._under_way: list[Offer] = []

    def begin(self, entries: Sequence[Entry]) -> Offer:
        offer = Offer(entries)
        self._under_way.append(offer)
        return offer

    def end(self, offer: Offer) -> None:
        offer.over = True
        self._under_way.remove(offer)

    def of(self, submissions: Sequence[Submission]) -> list[Offer]:
        if not self._under_way:
            return []
        wanted = set(submissions)
        return [offer for offer in self._under_way if any(entry.submission in wanted for entry in offer.entries)]


class Receipts:
    """Unreported receipts, by gateway. `tell` reports a receipt to the server, and may raise BrokerUnavailable."""

    def __init__(self, tell: Callable[[Receipt], Awaitable[None]], offers: Offers) -> None:
        self._tell_server, self._offers = tell, offers
        self._receipts: dict[str, Receipt] = {}
        self._telling: asyncio.Task[None] | None = None

    def take(self, gateway: str) -> Receipt | None:
        """Remove a gateway's receipt in order to report it, or return None if it has to wait. Call `keep` if the report fails."""
        receipt = self._receipts.get(gateway)
        if receipt is None or not all(offer.over for offer in receipt.held_by):
            return None
        return self._receipts.pop(gateway)

    def add(self, receipt: Receipt) -> None:
        """Add a receipt. It is reported with the next enqueue, or within READ_DELAY."""
        receipt = replace(receipt, held_by=self._offers.of(receipt.submissions))
        known = self._receipts.get(receipt.gateway)
        self._note(receipt if known is None else known.and_then(receipt))

    def keep(self, receipt: Receipt | None) -> None:
        """Put back a receipt whose report may have failed, before any later receipts."""
        if receipt is not None:
            later = self._receipts.get(receipt.gateway)
            self._note(receipt if later is None else receipt.and_then(later))

    def clear(self) -> None:
        self._receipts.clear()

    async def close(self) -> None:
        await end(self._telling)
        with contextlib.suppress(BrokerUnavailable):
            while self._receipts:
                await self._tell_server(self._receipts.popitem()[1])

    def _note(self, receipt: Receipt) -> None:
        self._receipts[receipt.gateway] = receipt
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        while self._receipts:
            await asyncio.sleep(READ_DELAY)
            for gateway in list(self._receipts):
                if (receipt := self.take(gateway)) is not None:
                    try:
                        await self._tell_server(receipt)
                    except BrokerUnavailable:
                        self.keep(receipt)
