"""Bound on the outputs of one completion.

A server that takes or sends hundreds of MB does nothing else for seconds, and every process of the fleet takes it for
gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from headway.model import Entry, ItemResult

log = structlog.get_logger(__name__)

MOST_BYTES = 64 << 20
"""Most bytes of the outputs that one completion carries."""
TOO_MUCH = "the outputs of its batch come to more than {most} MiB, and there was no room for this one; try again"


def fitting(entries: Sequence[Entry], items: Sequence[ItemResult], most: int = MOST_BYTES) -> Sequence[ItemResult]:
    """Cut the outputs of a batch to the bytes that a completion may carry; the other outputs become failures.

    Tenants share the bytes, and each one's smallest outputs come first. An output of an entry with dedup keys counts
    twice, as it is sent twice.
    """
    if 2 * 4 * sum(len(item.output or "") for item in items) <= most:  # Mostly; no character takes more than 4 bytes.
        return items
    if sum(_copies(entry) * 4 * len(item.output or "") for entry, item in zip(entries, items, strict=True)) <= most:
        return items
    sizes = [_copies(entry) * _bytes(item.output) for entry, item in zip(entries, items, strict=True)]
    if sum(sizes) <= most:
        return items
    used: dict[str, int] = {}
    order = []
    for place in sorted(range(len(items)), key=sizes.__getitem__):
        tenant = entries[place].tenant
        used[tenant] = used.get(tenant, 0) + sizes[place]
        order.append((used[tenant], place))
    fitted, room = list(items), most
    for _, place in sorted(order):
        if sizes[place] <= room:
            room -= sizes[place]
        else:
            fitted[place] = ItemResult(None, TOO_MUCH.format(most=most >> 20), fault=True)
    failed = sum(after is not before for after, before in zip(fitted, items, strict=True))
    log.warning("outputs of a batch do not fit into one completion", size=len(items), failed=failed, bytes=sum(sizes))
    return fitted


def _copies(entry: Entry) -> int:
    return 2 if entry.shares else 1


def _bytes(output: str | None) -> int:
    if output is None or output.isascii():
        return len(output or "")
    return len(output.encode("utf-8", "surrogatepass"))
