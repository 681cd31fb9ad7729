"""The CustomResourceDefinition of VCPORun, made from `vcpo.spec`.

`python -m vcpo_operator.crd` prints it; the chart carries the printed file.
"""

from vcpo_operator.crd.definition import crd, crd_to_yaml

__all__ = ["crd", "crd_to_yaml"]
