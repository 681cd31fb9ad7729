"""Children: pure builders of the objects that a run consists of, one module per kind."""

from vcpo_operator.children.family import OperatorDefaults, build_children
from vcpo_operator.children.manifest import Child, Kind, Manifest

__all__ = ["Child", "Kind", "Manifest", "OperatorDefaults", "build_children"]
