"""The operator may do what it does, nothing else, and only where it watches."""

import pytest

from tests.fixtures.chart.rendering import NAMESPACE, Manifest, Values, of_kind, render
from tests.fixtures.chart.variants import EVERYTHING, NARROW, all_variants

VARIANTS = all_variants()
CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
NEVER = {
    "pods/exec",
    "pods/attach",
    "pods/ephemeralcontainers",
    "roles",
    "rolebindings",
    "clusterroles",
    "clusterrolebindings",
    "nodes",
    "serviceaccounts/token",
}


def roles(values: Values) -> list[Manifest]:
    return [role for role in render(values) if role["kind"] in {"Role", "ClusterRole"}]


def operator_rules(values: Values) -> list[Manifest]:
    """Rules of the roles about runs; the one about the Lease is another."""
    named = [role for role in roles(values) if role["metadata"]["name"] == "vcpo-operator"]
    return [rule for role in named for rule in role["rules"]]


def grants(rules: list[Manifest]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_role_has_a_wildcard(values):
    words = {word for role in roles(values) for grant in grants(role["rules"]) for word in grant}
    assert not any("*" in word for word in words)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_operator_can_neither_enter_pods_nor_grant(values):
    assert {resource for _, resource, _ in grants(operator_rules(values))} & NEVER == set()


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_secrets_may_be_made_read_by_name_and_renewed_and_are_not_listed(values):
    verbs = {verb for _, resource, verb in grants(operator_rules(values)) if resource == "secrets"}
    has_role = values.get("rbac", {}).get("create", True)
    assert verbs == ({"get", "create", "update"} if has_role else set())


@pytest.mark.parametrize("verb", ["escalate", "bind", "impersonate", "deletecollection", "update"])
def test_no_verb_is_granted_that_would_widen_what_the_operator_can_do(verb):
    granted = {(resource, each) for _, resource, each in grants(operator_rules(EVERYTHING))}
    assert {resource for resource, each in granted if each == verb} <= {
        "vcporuns/finalizers",
        "leases",
        "secrets",
    }


def test_watching_some_namespaces_needs_no_cluster_wide_object():
    assert {manifest["kind"] for manifest in render(NARROW)} & CLUSTER_WIDE == set()


def test_a_narrow_role_grants_no_more_than_the_wide_one():
    narrow = grants(operator_rules(NARROW))
    extra = {("apiextensions.k8s.io", "customresourcedefinitions")}
    wide = {grant for grant in grants(operator_rules({})) if grant[:2] not in extra}
    assert narrow == wide


@pytest.mark.parametrize("values", [{}, NARROW, EVERYTHING], ids=["wide", "narrow", "everything"])
def test_every_binding_joins_an_existing_role_with_the_operators_account(values):
    names = {(role["kind"], role["metadata"]["name"]) for role in roles(values)}
    account = {"kind": "ServiceAccount", "name": "vcpo-operator", "namespace": NAMESPACE}
    bindings = [m for m in render(values) if m["kind"] in {"RoleBinding", "ClusterRoleBinding"}]
    for binding in bindings:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in names
        assert binding["subjects"] == [account]


def test_viewers_of_a_namespace_may_only_read_runs():
    (role,) = [role for role in of_kind("ClusterRole") if role["metadata"]["name"] == "vcpo-view"]
    assert {verb for _, _, verb in grants(role["rules"])} == {"get", "list", "watch"}
    assert role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"


def test_who_may_only_view_may_not_create_runs_since_runs_start_pods():
    (role,) = [role for role in of_kind("ClusterRole") if role["metadata"]["name"] == "vcpo-edit"]
    assert ("vcpo.dev", "vcporuns", "create") in grants(role["rules"])
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in role["metadata"]["labels"]


def test_no_user_role_may_write_a_status():
    user_roles = [r for r in of_kind("ClusterRole") if r["metadata"]["name"] != "vcpo-operator"]
    writes = {g for r in user_roles for g in grants(r["rules"]) if g[1] == "vcporuns/status"}
    assert writes == {("vcpo.dev", "vcporuns/status", "get")}
