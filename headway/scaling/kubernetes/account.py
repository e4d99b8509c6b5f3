"""Service account of this pod, as the kubelet mounts it.

The kubelet writes a new token well before the old one ends (after 48 minutes of an hour), and a new certificate of the cluster's
authority when there is one. So both are read for each call.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from headway.errors import ScalingRefused, SettingError

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which every pod finds its service account, unless it wants none."""
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT_HTTPS"


def api_url(environ: Mapping[str, str]) -> str:
    """URL of the API server, from the variables that every pod has.

    Raises:
        SettingError: this process runs in no pod.
    """
    host, port = environ.get(_HOST, ""), environ.get(_PORT, "443")
    if not host:
        reason = f"needs a pod of a cluster, and {_HOST} is not set"
        raise SettingError(
            "--autoscale", "kubernetes", reason, "Run the controller in the cluster, or choose another driver."
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class ServiceAccount:
    """Service account whose files lie in a folder.

    Arguments:
        folder: folder with `token`, `ca.crt` and `namespace`.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._authorities = ""
        self._trust: ssl.SSLContext | None = None

    @property
    def namespace(self) -> str:
        """Namespace of the pod.

        Raises:
            ScalingRefused: there is no such file.
        """
        return self._read("namespace")

    @property
    def token(self) -> str:
        """Token that says who asks, as it is now.

        Raises:
            ScalingRefused: there is no such file.
        """
        return self._read("token")

    @property
    def trust(self) -> ssl.SSLContext:
        """Context that trusts the cluster's authorities, as they are now.

        Raises:
            ScalingRefused: there is no such file, or it holds no certificate.
        """
        found = self._read("ca.crt")
        if self._trust is None or found != self._authorities:
            try:
                self._trust, self._authorities = ssl.create_default_context(cadata=found), found
            except (ssl.SSLError, ValueError) as exc:
                hint = "It is the ConfigMap kube-root-ca.crt of the pod's namespace."
                raise ScalingRefused(f"{self._folder / 'ca.crt'} holds no certificate: {exc}. {hint}") from None
        return self._trust

    def _read(self, name: str) -> str:
        path = self._folder / name
        try:
            found = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
            hint = "The pod needs a service account: serviceAccountName, and automountServiceAccountToken: true."
            raise ScalingRefused(f"{path} cannot be read: {reason}. {hint}") from None
        if not found:
            raise ScalingRefused(f"{path} is empty. The kubelet writes it: see the events of the pod.")
        return found
