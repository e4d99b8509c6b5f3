"""The rules of the Pod Security Standard `restricted` (including `baseline`) that the chart's objects could break.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator
from typing import Any

VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
PROFILES = {"RuntimeDefault", "Localhost"}


def violations(spec: dict[str, Any]) -> list[str]:
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    return sorted({*_of_pod(spec), *(found for container in containers for found in _of_container(container, spec))})


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    yield from (f"volume {volume['name']}" for volume in spec.get("volumes", []) if set(volume) - {"name"} - VOLUMES)
    yield from (f"sysctl {one['name']}" for one in spec.get("securityContext", {}).get("sysctls", []))


def _of_container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    pod, own = spec.get("securityContext", {}), container.get("securityContext", {})
    either = {**pod, **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "privilege escalation"
    if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
        yield "capabilities"
    if either.get("runAsNonRoot") is not True or either.get("runAsUser") == 0 or pod.get("runAsUser") == 0:
        yield "root"
    if either.get("seccompProfile", {}).get("type") not in PROFILES:
        yield "seccomp"
    yield from (name for name in ("appArmorProfile", "seLinuxOptions", "procMount") if name in either)
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "host port"
    handlers = [container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")]
    handlers += container.get("lifecycle", {}).values()
    if any(handler.get(way, {}).get("host") for handler in handlers for way in ("httpGet", "tcpSocket")):
        yield "host of a probe"
