import pytest
from transformers import AutoTokenizer

from vcpo.spec.workloads import PromptFormat
from vcpo_rollout.prompting import PromptCodec

TEMPLATE = (
    "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained("examples/models/tiny")


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def shown(codec, text):
    return codec.decode(codec.encode(text), frozenset())


def test_a_plain_prompt_is_its_text_and_nothing_else(chatty):
    assert shown(PromptCodec(chatty, PromptFormat.PLAIN), "312") == "312"


def test_a_chat_prompt_is_one_user_turn_and_the_cue_for_the_answer(chatty):
    assert shown(PromptCodec(chatty, PromptFormat.CHAT), "312") == "<312>="


def test_auto_is_chat_where_there_is_a_template(chatty):
    assert shown(PromptCodec(chatty, PromptFormat.AUTO), "312") == "<312>="


def test_auto_is_plain_where_there_is_none(tokenizer):
    assert shown(PromptCodec(tokenizer, PromptFormat.AUTO), "312") == "312"


def test_chat_without_a_template_is_refused_with_the_cure(tokenizer):
    with pytest.raises(ValueError, match=r"spec\.environment\.promptFormat: 'chat'.*use 'plain'"):
        PromptCodec(tokenizer, PromptFormat.CHAT)


def test_the_token_that_ended_an_answer_is_not_part_of_its_text(tokenizer):
    codec = PromptCodec(tokenizer, PromptFormat.PLAIN)
    end = tokenizer.eos_token_id
    assert codec.decode([*codec.encode("12"), end], frozenset({end})) == "12"


def test_an_end_token_in_the_middle_stays_visible_to_the_judge(tokenizer):
    codec = PromptCodec(tokenizer, PromptFormat.PLAIN)
    one, two = codec.encode("12")
    end = tokenizer.eos_token_id
    assert codec.decode([one, end, two], frozenset({end})) == "1<eos>2"


def test_an_answer_of_nothing_but_its_end_is_empty(tokenizer):
    codec = PromptCodec(tokenizer, PromptFormat.PLAIN)
    assert codec.decode([tokenizer.eos_token_id], frozenset({tokenizer.eos_token_id})) == ""


def replied(codec, text, *, last=0, ends=frozenset()):
    return codec.decode(codec.encode_reply(text, last, ends), frozenset())


def test_a_plain_reply_is_its_text_and_nothing_else(chatty):
    assert replied(PromptCodec(chatty, PromptFormat.PLAIN), "312") == "312"


def test_a_chat_reply_is_what_the_template_puts_between_two_answers(chatty):
    # Behind an answer the template writes `>`, then the message and the cue.
    assert replied(PromptCodec(chatty, PromptFormat.CHAT), "312") == "><312>="


def test_the_end_that_the_model_has_sampled_is_not_written_twice(chatty):
    codec = PromptCodec(chatty, PromptFormat.CHAT)
    (end,) = codec.encode_reply("312", 0, frozenset())[:1]
    assert replied(codec, "312", last=end, ends=frozenset({end})) == "<312>="
    assert replied(codec, "312", last=end + 1, ends=frozenset({end})) == "><312>="


def test_a_template_that_changes_answers_is_refused(chatty):
    chatty.chat_template = "{% for message in messages %}<{{ message.role }}>{% endfor %}"
    with pytest.raises(
        ValueError, match=r"spec\.environment\.promptFormat: the chat template changes"
    ):
        PromptCodec(chatty, PromptFormat.CHAT).encode_reply("312", 0, frozenset())
