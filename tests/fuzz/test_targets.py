"""No target fails on the inputs that are kept, or on a short draw of new ones; see `make fuzz`."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

KEPT = [(target, path) for target in TARGETS for path in target.kept]


@pytest.mark.parametrize(
    ("target", "path"), KEPT, ids=[str(path.relative_to(CORPUS)) for _, path in KEPT]
)
def test_an_input_that_is_kept_does_no_harm(target: Target, path):
    target.check(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_no_input_of_a_short_draw_does_harm(target: Target):
    @settings(
        max_examples=target.num_short_examples,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=target.damaged_inputs())
    def draw(data: bytes) -> None:
        target.check(data)

    draw()
