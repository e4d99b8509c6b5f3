"""API server of a Kubernetes cluster, as far as an autoscaler and kubectl need one: real routes over HTTP and TLS, tokens, RBAC,
resource versions, subresources, lists in pages, discovery. No controller runs behind it.
"""

from __future__ import annotations

import copy
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.authority import Authority

Object = dict[str, Any]
Rules = Sequence[Mapping[str, Any]]

EVERYTHING: Rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
KINDS = {
    ("v1", "pods"): ("Pod", False),
    ("apps/v1", "deployments"): ("Deployment", True),
    ("apps/v1", "statefulsets"): ("StatefulSet", True),
    ("autoscaling/v2", "horizontalpodautoscalers"): ("HorizontalPodAutoscaler", False),
    ("keda.sh/v1alpha1", "scaledobjects"): ("ScaledObject", False),
}
"""Kind of each resource by its group and version, and whether it has a scale."""
MERGES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_PATH = re.compile(r"/(?:api/(v1)|apis/([^/]+/[^/]+))/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(?:/(scale))?")


@dataclass(frozen=True)
class Asked:
    """One request that came."""

    method: str
    path: str
    query: Mapping[str, str]
    type: str
    body: Any
    token: str
    agent: str


class Refusal(Exception):
    """Answer that is no success, as a Status."""

    def __init__(self, code: int, reason: str, message: str, header: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.header = code, reason, message, dict(header or {})

    @property
    def status(self) -> Object:
        said = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**said, "message": self.message, "reason": self.reason, "code": self.code}


@dataclass
class Cluster:
    """Objects and users of the API server. `url` is where it listens, `authority` vouches for it."""

    authority: Authority
    url: str = ""
    users: dict[str, tuple[str, Rules]] = field(default_factory=dict)
    """Name and rules of each user by the token that it shows."""
    asked: list[Asked] = field(default_factory=list)
    instead: list[Callable[[], object]] = field(default_factory=list)
    """What is called before the next requests, one each; it may raise a Refusal, or wait."""
    keda: bool = True
    """Whether the cluster knows KEDA's kinds."""
    _objects: dict[tuple[str, str, str, str], Object] = field(default_factory=dict)
    _versions: int = 1000
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _came: threading.Condition = field(default_factory=threading.Condition)

    def clear(self) -> None:
        """Forget all objects, users and requests."""
        with self._lock:
            for everything in (self.users, self.asked, self.instead, self._objects):
                everything.clear()
            self.keda = True

    def add(self, version: str, resource: str, name: str, namespace: str = "serving", **members: Any) -> Object:
        """Put an object in; one of that name is written over."""
        kind, _ = KINDS[version, resource]
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
        return self._keep(
            (version, namespace, resource, name),
            {"apiVersion": version, "kind": kind, "metadata": {**metadata, **members.pop("metadata", {})}, **members},
        )

    def workload(self, resource: str, name: str, replicas: int, namespace: str = "serving") -> None:
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}}
        self.add("apps/v1", resource, name, namespace, spec=spec, status={"replicas": replicas})

    def replicas(self, resource: str, name: str, namespace: str = "serving") -> int:
        found: int = self._objects["apps/v1", namespace, resource, name]["spec"]["replicas"]
        return found

    def annotations(self, pod: str, namespace: str = "serving") -> dict[str, str]:
        found: dict[str, str] = self._objects["v1", namespace, "pods", pod]["metadata"].get("annotations", {})
        return found

    def until(self, holds: Callable[[], bool], patience: float) -> None:
        """Wait until something holds after a request; fails when it does not in time."""
        with self._came:
            assert self._came.wait_for(holds, patience), self.asked[-5:]

    def answer(self, asked: Asked) -> Object:
        """Answer to one request.

        Raises:
            Refusal: it is none.
        """
        try:
            return self._answer(asked)
        finally:
            with self._came:
                self._came.notify_all()

    def _answer(self, asked: Asked) -> Object:
        with self._lock:
            self.asked.append(asked)
            before = self.instead.pop(0) if self.instead else None
        if before is not None:
            before()
        with self._lock:
            if asked.token not in self.users:
                raise Refusal(401, "Unauthorized", "Unauthorized")
            if (found := self._discovery(asked.path)) is not None:
                return found
            place = _PATH.fullmatch(asked.path)
            version = "" if place is None else place[1] or place[2]
            if place is None or not self._knows(version, place[4], place[6]):
                raise Refusal(404, "NotFound", "404 page not found")
            _, _, namespace, resource, name, part = place.groups()
            self._allowed(asked, version, namespace, resource, unquote(name or ""), part or "")
            key = (version, namespace, resource, unquote(name or ""))
            return self._object(asked, key, part == "scale") if name else self._list(asked, key)

    def _knows(self, version: str, resource: str, part: str | None) -> bool:
        kind = KINDS.get((version, resource))
        return kind is not None and (kind[1] or part is None) and (self.keda or not version.startswith("keda"))

    def _allowed(self, asked: Asked, version: str, namespace: str, resource: str, name: str, part: str) -> None:
        user, rules = self.users[asked.token]
        verb = {"GET": "get" if name else "list", "PUT": "update"}.get(asked.method, asked.method.lower())
        group, whole = version.rpartition("/")[0], f"{resource}/{part}" if part else resource
        for rule in rules:
            wanted = (("apiGroups", group), ("resources", whole), ("verbs", verb))
            if all({value, "*"} & set(rule[member]) for member, value in wanted) and (
                name in rule.get("resourceNames", [name]) or not rule["resourceNames"]
            ):
                return
        named = f' "{name}"' if name else ""
        raise Refusal(
            403,
            "Forbidden",
            f'{resource}{"." + group if group else ""}{named} is forbidden: User "{user}" cannot {verb} resource '
            f'"{whole}" in API group "{group}" in the namespace "{namespace}"',
        )

    def _list(self, asked: Asked, key: tuple[str, str, str, str]) -> Object:
        found = [one for place, one in sorted(self._objects.items()) if place[:3] == key[:3]]
        first = int(asked.query.get("continue", "0"))
        last = first + int(asked.query.get("limit", "0") or len(found))
        more = {"continue": str(last)} if last < len(found) else {}
        kind = KINDS[key[0], key[2]][0]
        metadata = {"resourceVersion": str(self._versions), **more}
        return {"kind": f"{kind}List", "apiVersion": key[0], "metadata": metadata, "items": found[first:last]}

    def _object(self, asked: Asked, key: tuple[str, str, str, str], scale: bool) -> Object:
        if key not in self._objects:
            group = key[0].rpartition("/")[0]
            raise Refusal(404, "NotFound", f'{key[2]}{"." + group if group else ""} "{key[3]}" not found')
        present = self._objects[key]
        shown = _scale_of(present) if scale else present
        if asked.method == "GET":
            return shown
        if asked.method == "PATCH" and asked.type not in MERGES:
            raise Refusal(
                415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {asked.type}"
            )
        changed = _merged(shown, asked.body) if asked.method == "PATCH" else asked.body
        if changed["metadata"].get("resourceVersion") not in (None, "", present["metadata"]["resourceVersion"]):
            message = "the object has been modified; please apply your changes to the latest version and try again"
            raise Refusal(409, "Conflict", f'Operation cannot be fulfilled on {key[2]} "{key[3]}": {message}')
        if not scale:
            return self._keep(key, changed)
        replicas = changed["spec"].get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            raise Refusal(422, "Invalid", f"spec.replicas: Invalid value: {replicas}")
        return _scale_of(self._keep(key, _merged(present, {"spec": {"replicas": replicas}})))

    def _keep(self, key: tuple[str, str, str, str], changed: Object) -> Object:
        if self._objects.get(key) != changed:  # What changes nothing has no new version.
            self._versions += 1
            self._objects[key] = _merged(changed, {"metadata": {"resourceVersion": str(self._versions)}})
        return self._objects[key]

    def _discovery(self, path: str) -> Object | None:
        groups = sorted({version for version, _ in KINDS if "/" in version and self._knows_group(version)})
        if path == "/version":
            return {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(version) for version in groups]}
        version = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        if version not in (*groups, "v1"):
            return None
        resources = [
            one for (given, name), kind in KINDS.items() if given == version for one in _resources(name, *kind)
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    def _knows_group(self, version: str) -> bool:
        return self.keda or not version.startswith("keda")


def _group(version: str) -> Object:
    named = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.rpartition("/")[0], "versions": [named], "preferredVersion": named}


def _resources(name: str, kind: str, scales: bool) -> Iterator[Object]:
    verbs = ["get", "list", "patch", "update"]
    yield {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
    if scales:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
        yield {
            "name": f"{name}/scale",
            "singularName": "",
            "namespaced": True,
            **scale,
            "verbs": ["get", "patch", "update"],
        }


def _scale_of(workload: Object) -> Object:
    """Scale of a workload; no replicas are left out, as the API server does."""
    metadata = {member: workload["metadata"][member] for member in ("name", "namespace", "uid", "resourceVersion")}
    replicas = workload["spec"]["replicas"]
    labels = workload["spec"]["selector"]["matchLabels"]
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    spec = {"replicas": replicas} if replicas else {}
    status = {"replicas": workload["status"]["replicas"], "selector": selector}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}


def _merged(present: Any, change: Any) -> Any:
    """Merge patch of JSON (RFC 7396)."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    merged = dict(present) if isinstance(present, dict) else {}
    for name, value in change.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


@contextmanager
def serving(folder: Path) -> Iterator[Cluster]:
    """API server of a cluster without objects or users, whose certificate is for 127.0.0.1."""
    cluster = Cluster(Authority(folder, "cluster"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def _serve(self) -> None:
            address = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = Asked(
                self.command,
                address.path,
                {name: values[0] for name, values in parse_qs(address.query).items()},
                (self.headers.get("Content-Type") or "").partition(";")[0],
                json.loads(body) if body else None,
                (self.headers.get("Authorization") or "").partition(" ")[2],
                self.headers.get("User-Agent") or "",
            )
            header: Mapping[str, str] = {}
            try:
                code, answer = 200, cluster.answer(asked)
            except Refusal as exc:
                code, answer, header = exc.code, exc.status, exc.header
            encoded = json.dumps(answer).encode()
            try:
                self.send_response(code)
                fields = {"Content-Type": "application/json", "Content-Length": str(len(encoded)), **header}
                for name, value in fields.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(encoded)
            except OSError:
                self.close_connection = True  # Who asked has given up.

        do_GET = do_PATCH = do_PUT = _serve  # noqa: N815 - named by the library

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            """A client that does not trust the certificate is none of a test's failures."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*cluster.authority.issue("apiserver"))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    cluster.url = f"https://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def account(folder: Path, cluster: Cluster, token: str = "first", namespace: str = "serving") -> Path:
    """Folder of a service account, as the kubelet mounts it."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token)
    (folder / "namespace").write_text(namespace)
    (folder / "ca.crt").write_bytes(cluster.authority.file.read_bytes())
    return folder
