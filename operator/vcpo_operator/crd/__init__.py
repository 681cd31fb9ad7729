"""The CustomResourceDefinitions of VCPORun and VCPORunDefaults, generated from `vcpo.api`.

`python -m vcpo_operator.crd` prints the first; the chart holds both as files.
"""

from vcpo_operator.crd.run import run_crd, to_yaml
from vcpo_operator.crd.run_defaults import run_defaults_crd

__all__ = ["run_crd", "run_defaults_crd", "to_yaml"]
