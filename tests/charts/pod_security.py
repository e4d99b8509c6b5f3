"""The Pod Security Standard `restricted`, all of `baseline` included, as Kubernetes 1.35 has it, for pods of Linux.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "image",
}  # fmt: skip
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}  # fmt: skip
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
PROFILES = {"RuntimeDefault", "Localhost"}


def violations(spec: dict[str, Any]) -> list[str]:
    return sorted({*_of_pod(spec), *(found for one in _containers(spec) for found in _of_container(one, spec))})


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec["containers"], *spec.get("initContainers", []), *spec.get("ephemeralContainers", [])]


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    context = spec.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        if set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']}"
    for one in context.get("sysctls", []):
        if one["name"] not in SYSCTLS:
            yield f"sysctl {one['name']}"
    if context.get("runAsNonRoot") is False or context.get("runAsUser") == 0:
        yield "root"


def _of_container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    pod, own = spec.get("securityContext", {}), container.get("securityContext", {})
    either = {**pod, **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "privilege escalation"
    if "ALL" not in own.get("capabilities", {}).get("drop", []):
        yield "capabilities kept"
    if set(own.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities added"
    if either.get("runAsNonRoot") is not True or either.get("runAsUser") == 0:
        yield "root"
    if either.get("seccompProfile", {}).get("type") not in PROFILES:
        yield "seccomp"
    if either.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in PROFILES:
        yield "AppArmor"
    selinux = either.get("seLinuxOptions", {})
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "SELinux"
    if own.get("procMount", "Default") != "Default":
        yield "proc"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "host port"
    handlers = [container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")]
    handlers += container.get("lifecycle", {}).values()
    if any(handler.get(way, {}).get("host") for handler in handlers for way in ("httpGet", "tcpSocket")):
        yield "host of a probe"
    if own.get("windowsOptions", {}).get("hostProcess"):
        yield "host process"
