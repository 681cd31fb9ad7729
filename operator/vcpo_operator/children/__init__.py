"""Children: pure builders of the objects that make up a run."""

from vcpo_operator.children.family import build_children
from vcpo_operator.children.manifest import Child, Kind, Manifest
from vcpo_operator.children.network import OperatorDefaults

__all__ = ["Child", "Kind", "Manifest", "OperatorDefaults", "build_children"]
