"""gRPC port of a process, if it has one. Its packages are imported only here, as only processes with such a port need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.extras import install_hint
from headway.errors import SettingError
from headway.http.admission import Admission
from headway.http.readiness import Readiness
from headway.runtime.certificates import Certificates

if TYPE_CHECKING:
    from headway.grpc.listener import GrpcListener


def make_grpc_listener(
    admission: Admission, readiness: Readiness, certificates: Certificates | None = None
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
        raise SettingError("grpc_port", admission.settings.grpc_port, reason, hint) from exc
    return GrpcListener(admission, readiness, certificates)
