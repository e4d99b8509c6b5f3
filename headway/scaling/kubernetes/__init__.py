"""Driver over the API server of a Kubernetes cluster.

account   service account of this pod: token, authorities and namespace, which change while the pod lives
objects   the few members of Kubernetes objects that are read
api       calls of the API server, and what its errors mean
driver    scale of a Deployment or StatefulSet, who else owns it, and what losing a pod costs
"""

from headway.scaling.kubernetes.account import FOLDER, ServiceAccount, api_url
from headway.scaling.kubernetes.api import KubernetesApi
from headway.scaling.kubernetes.driver import KubernetesScaling, ScaleTarget, read_target

__all__ = ["FOLDER", "KubernetesApi", "KubernetesScaling", "ScaleTarget", "ServiceAccount", "api_url", "read_target"]
