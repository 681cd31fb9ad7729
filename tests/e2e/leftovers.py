"""What must be gone when a run has been deleted: its objects and its processes."""

from pathlib import Path

from tests.e2e.user import NAMESPACE
from tests.fakes.kubelet.client import KubeClient

_COLLECTIONS = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/serviceaccounts",
    "/api/v1/namespaces/{}/persistentvolumeclaims",
    "/apis/apps/v1/namespaces/{}/statefulsets",
    "/apis/apps/v1/namespaces/{}/deployments",
    "/apis/apps/v1/namespaces/{}/replicasets",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
)


async def objects_of(run: str, client: KubeClient) -> list[str]:
    """Objects that belong to a run, as `collection/name`."""
    found = []
    for template in _COLLECTIONS:
        path = template.format(NAMESPACE)
        listed = await client.get(path, labelSelector=f"vcpo.dev/run={run}")
        kind = path.rpartition("/")[2]
        found += [f"{kind}/{body['metadata']['name']}" for body in listed["items"]]
    return found


def processes_below(folder: Path) -> list[int]:
    """Living processes that work below a folder, as every container does. Linux only."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            where = (entry / "cwd").readlink()
        except OSError:
            continue  # gone meanwhile, or somebody else's
        if where.is_relative_to(folder):
            found.append(int(entry.name))
    return found
