"""Kubernetes' own client, which does what our driver does: scales a Deployment to 5, and says what losing a pod costs.

    kubernetes_program.py URL FOLDER

where FOLDER has a service account. Prints what it was told, as JSON.
"""

import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

from kubernetes import client
from kubernetes.config.incluster_config import InClusterConfigLoader

MERGE = "application/merge-patch+json"
COST = "controller.kubernetes.io/pod-deletion-cost"

url, folder = sys.argv[1:]
address = urlsplit(url)
environ = {"KUBERNETES_SERVICE_HOST": address.hostname, "KUBERNETES_SERVICE_PORT": str(address.port)}
InClusterConfigLoader(f"{folder}/token", f"{folder}/ca.crt", environ=environ).load_and_set()
namespace = Path(folder, "namespace").read_text()

objects, apps, core = client.CustomObjectsApi(), client.AppsV1Api(), client.CoreV1Api()
scaled = objects.list_namespaced_custom_object("keda.sh", "v1alpha1", namespace, "scaledobjects", limit=500)
autoscalers = client.AutoscalingV2Api().list_namespaced_horizontal_pod_autoscaler(namespace, limit=500)
before = apps.read_namespaced_deployment_scale("workers", namespace)
change = {"metadata": {"resourceVersion": before.metadata.resource_version}, "spec": {"replicas": 5}}
after = apps.patch_namespaced_deployment_scale("workers", namespace, change, _content_type=MERGE)
try:
    apps.patch_namespaced_deployment_scale("workers", namespace, change, _content_type=MERGE)
    again = 200
except client.ApiException as exc:
    again = exc.status
pod = core.patch_namespaced_pod("workers-a", namespace, {"metadata": {"annotations": {COST: "7"}}}, _content_type=MERGE)
sys.stdout.write(
    json.dumps(
        {
            "owners": [one["metadata"]["name"] for one in scaled["items"]]
            + [one.spec.scale_target_ref.name for one in autoscalers.items],
            "before": before.spec.replicas,
            "after": after.spec.replicas,
            "again": again,
            "cost": pod.metadata.annotations[COST],
        }
    )
)
