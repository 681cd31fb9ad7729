"""Authentication by bearer token and role-based access control.

A request without a token is the administrator's, so that tests need none; a server that is given
`tokens` knows their holders, and every other token is refused.
Source: https://kubernetes.io/docs/reference/access-authn-authz/rbac/
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.fakes.kubernetes.errors import ApiError, JsonObject, forbidden, unauthorized
from tests.fakes.kubernetes.objects.resources import Resource
from tests.fakes.kubernetes.requests.targets import Target
from tests.fakes.kubernetes.store import Store

_RBAC = "rbac.authorization.k8s.io"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
MASTERS = "system:masters"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody who may ask. groups: what bindings may also name."""

    name: str
    groups: tuple[str, ...] = ()


ADMIN = User(name="kubernetes-admin", groups=(MASTERS, "system:authenticated"))


def service_account(namespace: str, name: str) -> User:
    """The user that a ServiceAccount's token stands for."""
    return User(
        name=f"system:serviceaccount:{namespace}:{name}",
        groups=(
            "system:serviceaccounts",
            f"system:serviceaccounts:{namespace}",
            "system:authenticated",
        ),
    )


def user_of(headers: Mapping[str, str], tokens: Mapping[str, User]) -> User:
    """The sender.

    Raises:
        ApiError: 401 when the token is unknown.
    """
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return ADMIN
    if token not in tokens:
        raise unauthorized()
    return tokens[token]


def authorize(store: Store, user: User, verb: str, target: Target) -> None:
    """Refuse what no binding grants.

    Raises:
        ApiError: 403.
    """
    if not may(store, user, verb, target):
        raise _refusal(user, verb, target)


def may(store: Store, user: User, verb: str, target: Target) -> bool:
    """Whether some binding grants verb on target to user."""
    if MASTERS in user.groups:
        return True
    return any(_grants(rule, verb, target) for rule in _rules(store, user, target.namespace))


def review(store: Store, user: User, body: JsonObject) -> JsonObject:
    """The answer to a SelfSubjectAccessReview."""
    asked = body["spec"]["resourceAttributes"]
    resource = Resource(group=asked["group"], version="", plural=asked["resource"], kind="")
    target = Target(
        resource=resource, namespace=asked["namespace"], subresource=asked["subresource"]
    )
    return {**body, "status": {"allowed": may(store, user, asked["verb"], target)}}


def _refusal(user: User, verb: str, target: Target) -> ApiError:
    resource = target.resource.plural
    resource += f"/{target.subresource}" if target.subresource else ""
    place = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    why = (
        f'User "{user.name}" cannot {verb} resource "{resource}" '
        f'in API group "{target.resource.group}" {place}'
    )
    return forbidden(target.resource.qualified, target.name, why)


def _rules(store: Store, user: User, namespace: str) -> Iterator[JsonObject]:
    for binding in store.objects((_RBAC, "clusterrolebindings")):
        if _names(binding, user):
            yield from _rules_of(store, binding["roleRef"], "")
    if not namespace:
        return
    for binding in store.objects((_RBAC, "rolebindings"), namespace):
        if _names(binding, user):
            yield from _rules_of(store, binding["roleRef"], namespace)


def _rules_of(store: Store, reference: JsonObject, namespace: str) -> list[JsonObject]:
    plural, place = ("roles", namespace) if reference["kind"] == "Role" else ("clusterroles", "")
    role = store.get((_RBAC, plural), place, reference["name"])
    return list((role or {}).get("rules") or ())


def _names(binding: JsonObject, user: User) -> bool:
    for subject in binding.get("subjects") or ():
        if subject["kind"] == "ServiceAccount":
            namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
            if service_account(namespace, subject["name"]).name == user.name:
                return True
        elif subject["name"] in ((user.name,) if subject["kind"] == "User" else user.groups):
            return True
    return False


def _grants(rule: JsonObject, verb: str, target: Target) -> bool:
    plural, sub = target.resource.plural, target.subresource
    resources = {f"{plural}/{sub}", f"*/{sub}", "*"} if sub else {plural, "*"}
    names = rule.get("resourceNames")
    return (
        bool({verb, "*"} & set(rule.get("verbs") or ()))
        and bool({target.resource.group, "*"} & set(rule.get("apiGroups") or ()))
        and bool(resources & set(rule.get("resources") or ()))
        and (not names or target.name in names)
    )
