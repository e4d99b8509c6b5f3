"""gRPC port of a process, if it has one. Its packages are imported only here, as only processes with such a port need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.extras import needing
from headway.doors.entrance import Entrance
from headway.doors.readiness import Readiness
from headway.runtime.certificates import Certificates

if TYPE_CHECKING:
    from headway.grpc.listener import GrpcListener


def make_grpc_listener(
    entrance: Entrance, readiness: Readiness, certificates: Certificates | None = None
) -> GrpcListener:
    """Make the listener of the gRPC port.

    Raises:
        SettingError: a package is missing.
    """
    reason = "needs the packages hpack and protobuf, which are not here"
    with needing("grpc", "grpc_port", entrance.settings.grpc_port, reason):
        from headway.grpc.listener import GrpcListener
    return GrpcListener(entrance, readiness, certificates)
