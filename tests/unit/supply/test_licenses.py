"""Licenses are read in metadata, and only those that the policy allows are shipped."""

from __future__ import annotations

import pytest

from scripts.supply.license_policy import LicensePolicy, PolicyError
from scripts.supply.licenses import (
    LIST,
    license_problems,
    listed_licenses,
    read_policy,
    rendered_list,
    shipped_releases,
)

TABLE = {
    "allowed": ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"],
    "exceptions": {"LicenseRef-Maker": {"packages": ["maker-*"], "why": "its terms allow it"}},
    "classifiers": {"MIT License": "MIT", "Apache Software License": "Apache-2.0"},
    "packages": {"vague": "Apache-2.0"},
}
POLICY = LicensePolicy.from_table(TABLE)
MIT = "License :: OSI Approved :: MIT License"
APACHE = "License :: OSI Approved :: Apache Software License"
BSD = "License :: OSI Approved :: BSD License"


@pytest.mark.parametrize(
    ("package", "metadata", "license_id"),
    [
        (
            "clear",
            {"license_expression": "MIT OR Apache-2.0", "license": "GPL"},
            "MIT OR Apache-2.0",
        ),
        ("old", {"license": "apache-2.0"}, "Apache-2.0"),
        ("old", {"license": "Copyright 2020 somebody", "classifier": [MIT]}, "MIT"),
        ("old", {"classifier": ["Topic :: Games", MIT]}, "MIT"),
        ("two", {"classifier": [MIT, APACHE]}, "unknown"),
        ("vague", {"license": "BSD", "classifier": [BSD]}, "Apache-2.0"),
        ("vague", {"license_expression": "MIT"}, "MIT"),
        ("silent", {"license": "BSD", "classifier": [BSD]}, "unknown"),
        ("silent", {}, "unknown"),
    ],
)
def test_a_license_is_the_metadatas_expression_else_its_classifier_else_the_policys_word(
    package, metadata, license_id
):
    assert POLICY.license_of(package, metadata) == license_id


@pytest.mark.parametrize(
    ("package", "expression", "allowed"),
    [
        ("any", "MIT", True),
        ("any", "GPL-3.0-only", False),
        ("any", "MIT AND GPL-3.0-only", False),
        ("any", "MIT OR GPL-3.0-only", True),
        ("any", "GPL-3.0-only OR MIT AND Apache-2.0", True),
        ("any", "Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("any", "MIT AND (GPL-3.0-only OR Apache-2.0)", False),
        ("any", "MIT AND (MIT OR Apache-2.0)", True),
        ("any", "unknown", False),
        ("any", "LicenseRef-Maker", False),
        ("maker-library", "LicenseRef-Maker AND MIT", True),
    ],
)
def test_every_side_of_an_and_or_one_of_an_or_must_be_allowed(package, expression, allowed):
    assert POLICY.allows(package, expression) == allowed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packages": {"vague": "BSD"}}, "packages.vague: Unknown license: 'bsd'"),
        ({"classifiers": {"MIT License": ""}}, "classifiers.MIT License: "),
        ({"allowed": ["Apache 2"]}, "allowed or exceptions: "),
        ({"allowed": ["mit"]}, "allowed or exceptions is 'mit', SPDX writes 'MIT'"),
    ],
)
def test_a_license_that_spdx_does_not_have_is_refused_in_the_policy(change, said):
    with pytest.raises(PolicyError) as refused:
        LicensePolicy.from_table(TABLE | change)
    assert str(refused.value).startswith(said)


def test_a_policy_without_one_of_its_tables_is_refused():
    with pytest.raises(PolicyError, match="lacks the table `classifiers`"):
        LicensePolicy.from_table({key: TABLE[key] for key in TABLE if key != "classifiers"})


def test_what_may_not_be_shipped_and_what_the_policy_names_for_nothing_is_said_all_at_once():
    licenses = {("free", "1"): "GPL-3.0-only", ("silent", "2"): "unknown", ("vague", "3"): "MIT"}
    assert license_problems(licenses, POLICY) == [
        "free 1 has the license GPL-3.0-only: allow it in deploy/licenses.toml, or drop it",
        "silent 2 has the license unknown: allow it in deploy/licenses.toml, or drop it",
        "deploy/licenses.toml: packages.vague is 'Apache-2.0', its metadata say 'MIT': remove it",
    ]
    assert license_problems({}, POLICY) == [
        "deploy/licenses.toml: packages.vague is in no image: remove it"
    ]


def test_a_package_that_the_list_does_not_have_yet_is_unknown():
    shipped = {("old", "1"): ["operator"], ("young", "2"): ["learner", "rollout"]}
    text = rendered_list(shipped, {("old", "1"): "MIT"})
    assert text.splitlines() == [
        "package,version,license,images",
        "old,1,MIT,operator",
        "young,2,unknown,learner rollout",
    ]
    assert listed_licenses(text) == {("old", "1"): "MIT", ("young", "2"): "unknown"}


def test_the_list_of_the_tree_is_of_its_locks_and_all_of_it_may_be_shipped():
    text = LIST.read_text(encoding="utf-8")
    assert rendered_list(shipped_releases(), listed_licenses(text)) == text
    assert license_problems(listed_licenses(text), read_policy()) == []
