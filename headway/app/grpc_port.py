"""gRPC port of a process, if it has one. Its packages are imported only here, as only processes with such a port need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config import Settings
from headway.config.extras import install_hint
from headway.errors import SettingError
from headway.gateway.gateway import Gateway
from headway.gateway.refusal_traces import RefusalTraces
from headway.http.readiness import Readiness
from headway.ports import Identity
from headway.runtime.certificates import Certificates
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id

if TYPE_CHECKING:
    from headway.grpc.listener import GrpcListener


def make_grpc_listener(
    settings: Settings,
    gateway: Gateway,
    identity: Identity,
    readiness: Readiness,
    counters: Counters,
    certificates: Certificates | None = None,
    refusal_traces: RefusalTraces | None = None,
) -> GrpcListener:
    """Make the listener of the gRPC port.

    Raises:
        SettingError: a package is missing.
    """
    try:
        from headway.grpc.listener import GrpcListener
    except ImportError as exc:
        if (exc.name or "").partition(".")[0] not in ("hpack", "google"):
            raise
        hint = install_hint("grpc")
        reason = "needs the packages hpack and protobuf, which are not here"
        raise SettingError("grpc_port", settings.grpc_port, reason, hint) from exc
    return GrpcListener(settings, gateway, identity, readiness, new_id, counters, certificates, refusal_traces)
