from benchmarks.estimators import reference_parity


def test_a_second_derivation_finds_the_same_numbers() -> None:
    errors = reference_parity.compare(batches=30, seed=1)
    assert sorted(errors) == ["ess_ratio", "learning_rate_scale", "optimal_baseline"]
    assert max(errors.values()) < 1e-10
