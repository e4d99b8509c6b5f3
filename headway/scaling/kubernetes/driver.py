"""Number of workers as replicas of a Deployment or StatefulSet.

    scale   who else owns the replicas? ──▶ read the scale ──▶ change it, if it is still the one that was read
                  │ somebody                     ▲                    │ 409
                  ▼                              └────────────────────┘
            ScalingRefused

Two autoscalers of one workload undo each other's changes for ever, so where a HorizontalPodAutoscaler or a ScaledObject of
KEDA is there, nothing is changed, and as long as nobody may look for one, neither.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import msgspec

from headway.errors import ScalingRefused, ScalingUnavailable
from headway.ports import ScalingDriver
from headway.runtime.logger import get_logger
from headway.scaling.kubernetes.api import CONFLICT, NOT_FOUND, KubernetesApi
from headway.scaling.kubernetes.objects import Autoscaler, Autoscalers, ResourcePath, Scale

log = get_logger(__name__)

CONFLICTS = 5
"""Times that a scale which somebody changes at the same time is read again."""
PAGE = 500
"""Autoscalers in one answer."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod: of a Deployment that shrinks, pods of the lowest number go first."""

_KINDS = {"deployment": ("Deployment", "deployments"), "statefulset": ("StatefulSet", "statefulsets")}
_AUTOSCALERS = (
    ("ScaledObject", "keda.sh/v1alpha1", "scaledobjects"),
    ("HorizontalPodAutoscaler", "autoscaling/v2", "horizontalpodautoscalers"),
)


class ScaleTarget(msgspec.Struct, frozen=True):
    """Workload that has the replicas of a model.

    Attributes:
        kind: `deployment` or `statefulset`.
        name: its name.
        namespace: its namespace; empty: that of this pod.
        slots: workers of one replica.
    """

    kind: str
    name: str
    namespace: str = ""
    slots: int = 1

    @property
    def cheapest_goes(self) -> bool:
        """Whether the pod that costs least goes first; a StatefulSet always gives up the one of the highest number."""
        return self.kind == "deployment"

    def place(self, namespace: str) -> ResourcePath:
        """Path of its scale; `namespace` is that of this pod."""
        return ResourcePath("apps/v1", self.namespace or namespace, _KINDS[self.kind][1], self.name, "scale")


def read_target(text: str, slots: int = 1) -> ScaleTarget:
    """Target from [NAMESPACE/]KIND/NAME, whose form the settings have checked."""
    *namespace, kind, name = text.split("/")
    return ScaleTarget(kind, name, "".join(namespace), slots)


class KubernetesScaling(ScalingDriver):
    """Driver over the API server of a cluster. See `headway.ports.ScalingDriver`.

    A process of the fleet has the name of its pod, by which `mark` finds it.

    Arguments:
        api: API server.
        targets: workload of each model.
    """

    def __init__(self, api: KubernetesApi, targets: Mapping[str, ScaleTarget]) -> None:
        self._api, self._targets = api, targets
        self._marked: dict[str, int] = {}
        self._told = ""

    async def current(self, model: str) -> int:
        """See ScalingDriver.

        Raises:
            ScalingRefused: the model has no workload.
            ScalingUnavailable: the API server does not answer.
        """
        target = self._target(model)
        return (await self._scale(target.place(self._api.namespace))).spec.replicas * target.slots

    async def scale(self, model: str, workers: int) -> None:
        target = self._target(model)
        place, replicas = target.place(self._api.namespace), -(-workers // target.slots)
        await self._check_owner(target, place)
        for _ in range(CONFLICTS):
            found = await self._scale(place)
            if found.spec.replicas == replicas:
                return
            version = found.metadata.resource_version
            change = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
            status = await self._api.patch(place, change)
            if status == NOT_FOUND:
                raise _absent(place)
            if status != CONFLICT:
                return
        raise ScalingUnavailable(f"somebody changed {place} {CONFLICTS} times while it was to be changed")

    async def mark(self, costs: Mapping[str, int]) -> None:
        """See ScalingDriver. Only numbers that have changed are written, as each write is a change of a pod.

        Whoever may not write them scales all the same: then pods go as Kubernetes likes.
        """
        self._marked = {name: cost for name, cost in self._marked.items() if name in costs}
        changed = {name: cost for name, cost in costs.items() if self._marked.get(name) != cost}
        own = self._api.namespace if changed else ""
        spaces = {target.namespace or own for target in self._targets.values() if target.cheapest_goes}
        if not changed or not spaces:
            return
        try:
            for name, cost in changed.items():
                change = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
                for space in sorted(spaces):
                    await self._api.patch(ResourcePath("v1", space, "pods", name), change)
                self._marked[name] = cost  # Also if it is no pod: then it never will be.
        except ScalingRefused as exc:
            if str(exc) != self._told:
                self._told = str(exc)
                log.info("what losing a pod costs is not written, and any pod may go", reason=self._told)

    def _target(self, model: str) -> ScaleTarget:
        if model not in self._targets:
            hint = f'For example scale_target = "deployment/NAME" in the table [models."{model}"] of the controller\'s file.'
            raise ScalingRefused(f"the model {model} has no scale_target. {hint}")
        return self._targets[model]

    async def _scale(self, place: ResourcePath) -> Scale:
        found = await self._api.get(place, Scale)
        if found is None:
            raise _absent(place)
        return found

    async def _check_owner(self, target: ScaleTarget, place: ResourcePath) -> None:
        """Refuse where another autoscaler changes the replicas of a workload.

        Raises:
            ScalingRefused: there is one.
        """
        kind = _KINDS[target.kind][0]
        for named, version, resource in _AUTOSCALERS:
            async for one in self._autoscalers(ResourcePath(version, place.namespace, resource)):
                scales = one.spec.target
                if (scales.kind, scales.name) == (kind, target.name) and scales.version.startswith("apps/"):
                    hint = "Delete it, or set --autoscale none and let it go by headway_desired_workers."
                    raise ScalingRefused(
                        f"the {named} {one.metadata.name} in namespace {place.namespace} owns the replicas of {kind} "
                        f"{target.name}. {hint}"
                    )

    async def _autoscalers(self, place: ResourcePath) -> AsyncIterator[Autoscaler]:
        """Autoscalers of a namespace; none where the cluster does not know the kind."""
        more = ""
        while True:
            query = {"limit": str(PAGE), **({"continue": more} if more else {})}
            page = await self._api.get(place, Autoscalers, "list", query)
            if page is None:
                return
            for one in page.items:
                yield one
            more = page.metadata.more
            if not more:
                return


def _absent(place: ResourcePath) -> ScalingRefused:
    return ScalingRefused(f"there is no such workload: {place}. Correct scale_target.")
