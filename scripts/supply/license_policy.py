"""Which licenses an image may ship, and how the words of a package's metadata name a license."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

UNKNOWN: Final = "unknown"
"""License of a package whose metadata names none; no policy allows it."""

_OPERATORS: Final = re.compile(r" (?:AND|OR) ")


class PolicyError(ValueError):
    """A table of the policy is missing, or names a license that SPDX does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenseException:
    """Packages that may have a license which the others may not."""

    packages: tuple[str, ...]
    """Names or patterns such as ``nvidia-*``."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LicensePolicy:
    """The tables of deploy/licenses.toml."""

    allowed: frozenset[str]
    """SPDX identifiers; an exception of SPDX belongs to them: ``... WITH LLVM-exception``."""
    exceptions: Mapping[str, LicenseException]
    classifiers: Mapping[str, str]
    """SPDX expression of a trove classifier's last part."""
    packages: Mapping[str, str]
    """SPDX expression of packages whose metadata leaves it open."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LicensePolicy:
        """The policy in a parsed TOML file.

        Raises: PolicyError that names the table and the value.
        """
        for name in ("allowed", "exceptions", "classifiers", "packages"):
            if name not in table:
                raise PolicyError(f"lacks the table `{name}`")
        for name in ("classifiers", "packages"):
            for key, expression in table[name].items():
                _check_license(f"{name}.{key}", expression)
        for license_id in (*table["allowed"], *table["exceptions"]):
            _check_license("allowed or exceptions", license_id)
        return cls(
            allowed=frozenset(table["allowed"]),
            exceptions={
                name: LicenseException(packages=tuple(each["packages"]), why=each["why"])
                for name, each in table["exceptions"].items()
            },
            classifiers=table["classifiers"],
            packages=table["packages"],
        )

    def license_of(self, package: str, metadata: Mapping[str, Any]) -> str:
        """SPDX expression of a package, or `UNKNOWN`.

        package: canonical name.
        metadata: core metadata as JSON (https://peps.python.org/pep-0566/#json-compatible-metadata).
        An SPDX expression counts first, then classifiers that name one license, then the policy.
        """
        for text in (metadata.get("license_expression"), metadata.get("license")):
            try:
                return canonicalize_license_expression(text or "")
            except InvalidLicenseExpression:
                continue
        named = {
            self.classifiers.get(each.rpartition(" :: ")[2])
            for each in metadata.get("classifier", ())
            if each.startswith("License :: ")
        }
        by_classifier = named.pop() if len(named) == 1 else None
        return by_classifier or self.packages.get(package, UNKNOWN)

    def allows(self, package: str, expression: str) -> bool:
        """Whether an image may ship the package under this license.

        One side of an OR is enough; with parentheses every license in it must be allowed.
        """
        if "(" in expression:
            plain = expression.replace("(", "").replace(")", "")
            return all(self._allows_one(package, each) for each in _OPERATORS.split(plain))
        return any(
            all(self._allows_one(package, each) for each in side.split(" AND "))
            for side in expression.split(" OR ")
        )

    def _allows_one(self, package: str, license_id: str) -> bool:
        if license_id in self.allowed:
            return True
        exception = self.exceptions.get(license_id)
        return exception is not None and any(
            fnmatchcase(package, pattern) for pattern in exception.packages
        )


def _check_license(field: str, expression: str) -> None:
    try:
        canonical = canonicalize_license_expression(expression)
    except InvalidLicenseExpression as error:
        raise PolicyError(f"{field}: {error}") from error
    if canonical != expression:
        raise PolicyError(f"{field} is {expression!r}, SPDX writes {canonical!r}")
