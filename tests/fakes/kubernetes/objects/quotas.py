"""ResourceQuota for pods: what exceeds it is refused.

Departures: no other resource is counted, there is no status, and of a name that the server would
make up a refusal shows the beginning only.
Source: kubernetes/plugin/pkg/admission/resourcequota
"""

from __future__ import annotations

from tests.fakes.kubernetes.errors import JsonObject, forbidden
from tests.fakes.kubernetes.objects.deletion import PODS
from tests.fakes.kubernetes.store import Store

QUOTAS = ("", "resourcequotas")
_FINISHED = ("Succeeded", "Failed")


def refuse_beyond_quota(store: Store, namespace: str, pod: JsonObject) -> None:
    """Let one more pod into a namespace, or not.

    Raises:
        ApiError: 403 when a quota of the namespace is used up.
    """
    pods = store.objects(PODS, namespace)
    used = sum(each["status"].get("phase") not in _FINISHED for each in pods)
    for quota in store.objects(QUOTAS, namespace):
        limit = (quota["spec"].get("hard") or {}).get("pods")
        if limit is None or used < int(limit):
            continue
        metadata = pod["metadata"]
        name = metadata.get("name") or metadata.get("generateName", "")
        why = f"exceeded quota: {quota['metadata']['name']}, requested: pods=1, used: pods={used}"
        raise forbidden("pods", name, f"{why}, limited: pods={limit}")
