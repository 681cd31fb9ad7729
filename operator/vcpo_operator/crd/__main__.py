"""`python -m vcpo_operator.crd`: print the CustomResourceDefinition as YAML."""

import sys

from vcpo_operator.crd import run_crd, to_yaml

if __name__ == "__main__":
    sys.stdout.write(to_yaml(run_crd()))
