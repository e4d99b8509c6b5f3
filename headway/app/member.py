"""Description of a process, as its heartbeat tells the fleet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headway import __version__
from headway.config import Settings
from headway.model import ProcessInfo, Role

if TYPE_CHECKING:
    from headway.controller.controller import Controller
    from headway.gateway.gateway import Gateway


def describe_process(
    settings: Settings,
    role: Role,
    id: str,
    gateway: Gateway | None,
    controller: Controller | None,
    admin_port: int,
    scalable: Mapping[str, tuple[int, int]],
    every: float,
) -> ProcessInfo:
    """Describe a process as it is now.

    Arguments:
        settings: settings of the process.
        role: role of the process.
        id: its id in the fleet.
        gateway: its gateway; None where it has none.
        controller: its controller; None where it has none.
        admin_port: number of its admin port; 0 while that is not open.
        scalable: see ProcessInfo.
        every: seconds until its next heartbeat.
    """
    throttles = gateway.limiter.throttles if gateway is not None else {}
    arrivals = {model: one.rates for model, one in throttles.items()}
    model = (settings.default or next(iter(settings.served))) if gateway is not None else ""
    weights = {} if settings.models else {"max-batch-weight": str(settings.max_batch_weight), "weight": settings.weight}
    host = f"[{settings.admin_host}]" if ":" in settings.admin_host else settings.admin_host
    return ProcessInfo(
        id=id,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        admin=f"{settings.scheme}://{host}:{admin_port}" if admin_port else "",
        version=__version__,
        pending=gateway.pending if gateway is not None else 0,
        requests_per_second=gateway.requests_per_second if gateway is not None else 0.0,
        model=model,
        leads=controller is not None and controller.leads,
        shared={
            "shards": str(settings.shards),
            "tiers": ",".join(settings.tier_names),
            "kept-mb": f"{settings.kept_mb:g}",
            **weights,
            **({} if controller is None else _of_controllers(settings)),
        },
        arrivals={model: (one.higher, one.lowest) for model, one in arrivals.items()},
        tenant_rates={model: one.tenants for model, one in arrivals.items()},
        zone=settings.zone,
        scalable=dict(scalable),
        versions={} if gateway is None else gateway.rollout_counts.counts,
        every=every,
    )


def _of_controllers(settings: Settings) -> dict[str, str]:
    """Settings in which all controllers must agree, as any of them may lead."""
    return {
        "autoscale": settings.autoscale,
        "scale-policy": settings.scale_policy,
        "scale-rules": settings.scale_rules or "the usual ones",
        "min-workers": str(settings.min_workers),
        "max-workers": str(settings.max_workers),
        "scale-to-zero-after-s": f"{settings.scale_to_zero_after_s:g}",
    }
