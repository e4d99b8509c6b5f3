"""Notices to the service manager that started this process: systemd, or another that knows its protocol.

`NOTIFY_SOCKET` names its datagram socket. It is taken out of the environment, so that no process of a target can speak for this one.

    READY=1       the ports are open; what was ordered after this service may start
    STOPPING=1    the process drains
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from headway.runtime.logger import get_logger

log = get_logger(__name__)

VARIABLE = "NOTIFY_SOCKET"


class ServiceManager:
    """Service manager of this process; without one nothing is told.

    Arguments:
        environ: environment that may name it.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop(VARIABLE, "")

    def tell_ready(self) -> None:
        """Tell that the process serves."""
        self._tell("READY=1\nSTATUS=serving")

    def tell_stopping(self) -> None:
        """Tell that the process is on its way out."""
        self._tell("STOPPING=1\nSTATUS=draining")

    def _tell(self, notice: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(notice.encode(), address)
        except OSError as exc:
            log.warning("the service manager cannot be told", notice=notice.partition("\n")[0], error=str(exc))
