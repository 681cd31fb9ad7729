"""Run files: what YAML means, what is no run file, and writing one that reads back equal."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.api import SpecError, VCPORun, load_run, parse_run, run_to_yaml

HEAD = "metadata: {name: r}\nspec:\n  model: {name: m}\n  environment: {name: countdown}\n"


def message_of(text: str) -> str:
    """The single problem with the file as a whole."""
    with pytest.raises(SpecError) as refused:
        parse_run(text)
    (problem,) = refused.value.problems
    assert problem.path == "(file)"
    return problem.message


class TestYaml:
    @pytest.mark.parametrize(("text", "number"), [("1e-6", 1e-6), ("1E-6", 1e-6), ("5e-4", 5e-4)])
    def test_an_exponent_makes_a_number(self, text, number):
        run = parse_run(f"{HEAD}  steps: 3\n  optimizer: {{learningRate: {text}}}")
        assert run.spec.optimizer.learning_rate == number

    @pytest.mark.parametrize("word", ["yes", "no", "on", "off", "y"])
    def test_a_yes_is_a_word(self, word):
        run = parse_run(f"{HEAD.replace('name: m', f'name: {word}')}  steps: 3")
        assert run.spec.model.name == word

    def test_a_key_given_twice_is_refused_with_its_place(self):
        message = message_of(f"{HEAD}  steps: 3\n  steps: 4")
        assert 'line 6, column 3: found duplicate key "steps"' in message

    def test_broken_yaml_is_refused_with_its_place(self):
        assert message_of("a: b: c").startswith("is not YAML: line 1, column 5: ")

    def test_a_tag_that_asks_for_code_is_refused(self):
        assert "could not determine a constructor" in message_of("a: !!python/object:os.system x")

    @pytest.mark.parametrize("value", ["!!int ''", "!!float ''", "!!bool maybe"])
    def test_a_tag_that_does_not_fit_its_value_is_refused(self, value):
        assert "a tag does not fit its value" in message_of(f"a: {value}")

    def test_a_key_that_cannot_be_one_is_refused(self):
        assert "a key is not text" in message_of("{[{}]: 0}")

    def test_a_date_without_quotes_is_refused_with_the_cure(self):
        assert "put dates in quotes" in message_of(f"{HEAD}  steps: 2020-12-31")

    def test_a_document_that_contains_itself_is_refused(self):
        assert "Circular reference" in message_of("a: &a {b: *a}")

    def test_a_document_nested_too_deeply_is_refused(self):
        assert "is nested too deeply" in message_of("a: " + "[" * 1_000)

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("", "is empty; give a run file, with `spec`"),
            ("- a", "is a list; give a run file, with `spec`"),
            ("a: 1\n---\nb: 2", "has a second document at line 2; give one run a file"),
        ],
    )
    def test_what_is_no_mapping_is_named(self, text, what):
        assert message_of(text) == what

    @given(st.text())
    def test_no_text_does_worse_than_a_spec_error(self, text):
        with pytest.raises(SpecError):
            parse_run(text)


class TestReading:
    def test_a_layer_replaces_fields_and_lists_and_null_takes_one_away(self, tmp_path):
        base, other, last = (tmp_path / f"{name}.yaml" for name in ("base", "other", "last"))
        base.write_text(
            f"{HEAD}  steps: 5\n  seed: 7\n  rollouts: [{{name: a}}, {{name: b}}]\n"
            "  algorithm: {maxPolicyLagSteps: 3, method: grpo}\n"
        )
        other.write_text("spec: {rollouts: [{name: c}], algorithm: {maxPolicyLagSteps: 9}}")
        last.write_text("spec: {seed: null, steps: 8}")
        run = load_run(base, ["steps=9"], layers=[other, last]).spec
        assert (run.algorithm.max_policy_lag_steps, run.algorithm.method) == (9, "grpo")
        assert ([group.name for group in run.rollouts], run.seed, run.steps) == (["c"], 0, 9)
        last.write_text("spec: {stepz: 1}")
        with pytest.raises(SpecError, match=r"base.yaml \+ .*last.yaml: 1 problem\n  spec.stepz"):
            load_run(base, layers=[last])

    def test_a_file_is_read(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(f"{HEAD}  steps: 7\n", encoding="utf-8")
        assert load_run(path).spec.steps == 7

    def test_other_encodings_are_refused(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_bytes("metadata: {name: ü}".encode("latin-1"))
        with pytest.raises(SpecError, match="is not UTF-8 text"):
            load_run(path)

    def test_no_more_than_one_mebibyte_of_a_file_is_read(self, tmp_path):
        path = tmp_path / "model.bin"
        path.write_bytes(b"\xff" * (2**20 + 1))
        for endless in (path, Path("/dev/zero")):
            with pytest.raises(SpecError, match="larger than 1 MiB"):
                load_run(endless)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


MODELS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=20)
PARAMETERS = st.text(max_size=6).filter(lambda name: name != "seed")  # it is the run's own


@st.composite
def documents(draw: st.DrawFn) -> dict[str, object]:
    """Valid runs, as JSON has them."""
    group_size = draw(st.integers(2, 64))
    least = draw(st.integers(0, 9))
    group = {"name": "a-1", "minReplicas": least, "maxReplicas": least + draw(st.integers(1, 9))}
    spec = {
        "model": {"name": draw(MODELS)},
        "environment": {
            "name": "tasks:Task",
            "parameters": draw(st.dictionaries(PARAMETERS, JSON_VALUES, max_size=3)),
        },
        "steps": draw(st.integers(1, 10_000_000)),
        "batch": {"trajectoriesPerPrompt": group_size},
        "algorithm": {"onPolicyEssRatio": draw(st.none() | st.floats(1e-9, 1.0))},
        "optimizer": {"learningRate": draw(st.floats(1e-12, 1.0))},
        "rollouts": [group],
        "ttlSecondsAfterFinished": draw(st.none() | st.integers(1, 31_536_000)),
    }
    return {"metadata": {"name": "r", "labels": {"team": draw(st.text(max_size=9))}}, "spec": spec}


class TestWriting:
    @settings(max_examples=25)
    @given(documents())
    def test_a_written_run_reads_back_equal(self, document):
        run = VCPORun.model_validate(document)
        assert parse_run(run_to_yaml(run)) == run

    def test_a_name_too_long_for_one_line_survives(self):
        escaped = r"0\x1f\x1f\x1f\x1f\x1f" + r"\U00010000" * 5 + "0 0"
        text = HEAD.replace("name: m", f'name: "{escaped}"')
        run = parse_run(f"{text}  steps: 3")
        assert run.spec.model.name == "0" + "\x1f" * 5 + "\U00010000" * 5 + "0 0"
        assert parse_run(run_to_yaml(run)) == run

    def test_an_empty_parameter_survives(self):
        text = HEAD.replace("{name: countdown}", "{name: a:B, parameters: {limit: null}}")
        run = parse_run(run_to_yaml(parse_run(f"{text}  steps: 3")))
        assert run.spec.environment.parameters == {"limit": None}
