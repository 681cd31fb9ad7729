"""The CustomResourceDefinition of VCPORun, generated from `vcpo.api`.

`python -m vcpo_operator.crd` prints it; the chart holds it as a file.
"""

from vcpo_operator.crd.run import run_crd, to_yaml

__all__ = ["run_crd", "to_yaml"]
