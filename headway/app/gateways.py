"""Making of a gateway, with its fallback and what observes its requests. Imported only by roles that have one."""

from __future__ import annotations

import random
from collections.abc import Callable

from headway.app.input_policy import PolicyResource
from headway.config import Settings, fallbacks_of
from headway.gateway.access_log import AccessLog
from headway.gateway.direct_mode import Fallback
from headway.gateway.gateway import Gateway
from headway.gateway.ledger_writer import LedgerWriter
from headway.gateway.pending import Observer, PendingTable
from headway.ports import Broker
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.counters import Counters
from headway.runtime.spans import SpanRecorder


def make_gateway(
    settings: Settings,
    broker: Broker,
    counters: Counters,
    clock: Callable[[], float],
    ledger_writer: LedgerWriter | None,
    held: PendingTable | None,
    policy: PolicyResource | None,
    certificates: RemoteCertificates | None,
    recorder: SpanRecorder | None,
    woken: Callable[[], None],
    in_doubt: Callable[[], bool],
) -> tuple[Fallback | None, Gateway]:
    """Make the gateway of a process, and the fallback that it asks while its broker is away, if one is set."""
    fallback = None
    if fallbacks_of(settings):
        from headway.app.fallbacks import make_fallback

        fallback = make_fallback(settings, counters, clock, certificates, recorder)
    observers: list[Observer] = [ledger_writer] if ledger_writer is not None else []
    if settings.access_log:
        observers.append(AccessLog(settings.access_log, settings.tier_names, random.random))
    traces = None
    if recorder is not None:
        from headway.gateway.request_traces import RequestTraces

        traces = RequestTraces(recorder, settings.tier_names, counters.gateway, settings.scheme)
    return fallback, Gateway(
        settings,
        [*settings.served],
        broker,
        counters.gateway,
        clock,
        direct=fallback,
        observers=observers,
        gate=None if policy is None else policy.gate,
        traces=traces,
        held=held,
        woken=woken,
        in_doubt=in_doubt,
    )
