"""Members of Kubernetes objects that the driver reads. All others are ignored, so that newer servers may add some."""

from __future__ import annotations

from urllib.parse import quote

import msgspec


class Metadata(msgspec.Struct):
    """Metadata of an object, or of a list with more to come."""

    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    more: str = msgspec.field(default="", name="continue")


class ScaleSpec(msgspec.Struct):
    """Number of replicas asked for. The API server leaves 0 out."""

    replicas: int = 0


class Scale(msgspec.Struct):
    """Scale of a workload (autoscaling/v1)."""

    metadata: Metadata
    spec: ScaleSpec = msgspec.field(default_factory=ScaleSpec)


class Reference(msgspec.Struct):
    """Workload that an autoscaler scales. A ScaledObject may leave out kind and version of a Deployment."""

    name: str
    kind: str = "Deployment"
    version: str = msgspec.field(default="apps/v1", name="apiVersion")


class AutoscalerSpec(msgspec.Struct):
    """Part of an autoscaler that says what it scales."""

    target: Reference = msgspec.field(name="scaleTargetRef")


class Autoscaler(msgspec.Struct):
    """HorizontalPodAutoscaler, or KEDA's ScaledObject."""

    metadata: Metadata
    spec: AutoscalerSpec


class Autoscalers(msgspec.Struct):
    """Page of a list of autoscalers."""

    items: list[Autoscaler]
    metadata: Metadata = msgspec.field(default_factory=Metadata)


class Status(msgspec.Struct):
    """Answer of the API server that is no success."""

    message: str = ""


class ResourcePath(msgspec.Struct, frozen=True):
    """Path of an object, or of a list, in the API.

    Attributes:
        version: group and version, as in `apps/v1`; the core group has none.
        namespace: its namespace.
        resource: name of its kind in the plural.
        name: its name; empty: a list of all.
        part: name of its subresource; empty: itself.
    """

    version: str
    namespace: str
    resource: str
    name: str = ""
    part: str = ""

    @property
    def path(self) -> str:
        """Path of its URL."""
        root = f"apis/{self.version}" if "/" in self.version else f"api/{self.version}"
        parts = ("namespaces", self.namespace, self.resource, self.name, self.part)
        return "/".join(["", root, *(quote(part, safe="") for part in parts if part)])

    def rule(self, *verbs: str) -> str:
        """Rule of a Role that allows these verbs, as YAML has it on one line."""
        group = self.version.rpartition("/")[0]
        resource = f"{self.resource}/{self.part}" if self.part else self.resource
        names = f', resourceNames: ["{self.name}"]' if self.part else ""
        return f'{{apiGroups: ["{group}"], resources: ["{resource}"]{names}, verbs: [{", ".join(verbs)}]}}'

    def __str__(self) -> str:
        named = f"{self.resource} {self.name}".strip()
        return f"{'the scale of ' if self.part else ''}{named} in namespace {self.namespace}"
