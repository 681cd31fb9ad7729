"""`python -m vcpo_operator.crd`: print the CustomResourceDefinition as YAML."""

import sys

from vcpo_operator.crd import crd_to_yaml

if __name__ == "__main__":
    sys.stdout.write(crd_to_yaml())
