"""`python -m vcpo_operator.crd run|scaler`: print a CustomResourceDefinition as YAML."""

import argparse
import sys

from vcpo_operator.crd import DEFINITIONS, to_yaml

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m vcpo_operator.crd", description=__doc__)
    parser.add_argument("name", choices=DEFINITIONS, help="kind that is defined")
    name = parser.parse_args().name
    sys.stdout.write(to_yaml(DEFINITIONS[name](), name))
