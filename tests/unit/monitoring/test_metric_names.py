from tools.monitoring.metric_names import names_in


def test_a_series_of_a_histogram_is_named_with_and_without_its_ending():
    expression = 'rate(vcpo_policy_lag_steps_bucket{le="1"}[5m]) > namespace_run:vcpo_active'
    names = names_in(expression)
    assert {"vcpo_policy_lag_steps_bucket", "vcpo_policy_lag_steps"} <= names
    assert "namespace_run:vcpo_active" in names
