import copy
from datetime import date
from typing import ClassVar

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.fixtures.rollout.tokenizers import byte_level
from vcpo.api.workloads import PromptFormat
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.environments import Prompt

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


def make_prompt(text):
    return Prompt(text=text, answer="")


def round_trip(codec, text):
    return codec.decode(codec.encode(make_prompt(text)), frozenset())


def test_a_prompt_is_its_text_or_one_user_turn_and_the_cue_for_the_response(tokenizer):
    assert round_trip(PromptCodec(tokenizer, PromptFormat.AUTO), "312") == "312"
    tokenizer.chat_template = TEMPLATE
    assert round_trip(PromptCodec(tokenizer, PromptFormat.PLAIN), "312") == "312"
    assert round_trip(PromptCodec(tokenizer, PromptFormat.CHAT), "312") == "<312>="


def test_chat_without_a_template_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"spec\.environment\.promptFormat: 'chat' needs"):
        PromptCodec(tokenizer, PromptFormat.CHAT)


def test_a_text_that_is_no_template_is_refused_with_the_cure(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ "
    said = r"spec\.model\.name: the chat template .* \(line 1: .*promptFormat to 'plain'"
    with pytest.raises(ValueError, match=said):
        PromptCodec(tokenizer, PromptFormat.AUTO)


def test_the_token_that_ended_a_response_is_not_part_of_its_text(tokenizer):
    codec = PromptCodec(tokenizer, PromptFormat.PLAIN)
    end = tokenizer.eos_token_id
    assert codec.decode([*codec.encode(make_prompt("12")), end], frozenset({end})) == "12"


def test_an_end_token_in_the_middle_stays_visible_to_the_judge(tokenizer):
    codec = PromptCodec(tokenizer, PromptFormat.PLAIN)
    one, two = codec.encode(make_prompt("12"))
    end = tokenizer.eos_token_id
    assert codec.decode([one, end, two], frozenset({end})) == "1<eos>2"


def encoded_reply(codec, text, *, last=0, ends=frozenset()):
    return codec.decode(codec.encode_reply(text, last, ends), frozenset())


def test_a_chat_reply_is_what_the_template_writes_between_two_responses(chatty):
    # Behind a response the template writes `>`, then the message and the cue.
    assert encoded_reply(PromptCodec(chatty, PromptFormat.CHAT), "312") == "><312>="


def test_the_end_that_the_model_has_sampled_is_not_written_twice(chatty):
    codec = PromptCodec(chatty, PromptFormat.CHAT)
    (end,) = codec.encode_reply("312", 0, frozenset())[:1]
    assert encoded_reply(codec, "312", last=end, ends=frozenset({end})) == "<312>="
    assert encoded_reply(codec, "312", last=end + 1, ends=frozenset({end})) == "><312>="


def test_a_template_that_changes_responses_is_refused(chatty):
    chatty.chat_template = "{% for message in messages %}<{{ message.role }}>{% endfor %}"
    with pytest.raises(
        ValueError, match=r"spec\.environment\.promptFormat: the chat template changes"
    ):
        PromptCodec(chatty, PromptFormat.CHAT).encode_reply("312", 0, frozenset())


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{{ m.content }}<|im_end|>\n", ["<|im_end|>"]),
        ("{{ m.content }}\n<|im_end|>", []),
        ("{{ m.content | upper }}<|im_end|>", []),
        ("{{ m.content }}{{ raise_exception('one turn') if loop.index > 1 }}<|im_end|>", []),
    ],
)
def test_the_token_that_a_template_writes_after_a_response_ends_one(template, ends):
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    found = PromptCodec(tokenizer, PromptFormat.CHAT).turn_end_ids
    assert tokenizer.convert_ids_to_tokens(sorted(found)) == ends
    assert PromptCodec(tokenizer, PromptFormat.PLAIN).turn_end_ids == frozenset()


@pytest.mark.parametrize("normalizer", [None, normalizers.Strip()], ids=str)
@pytest.mark.parametrize("text", ["=5", " 5", "\n5", "<b>", "5"])
def test_a_plain_reply_gets_no_space_that_a_tokenizer_puts_before_texts(text, normalizer):
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    vocabulary = {
        each: number for number, each in enumerate(["?", "a", f"{space}a", *f"=5<b>\n.{space}"])
    }
    inner = Tokenizer(BPE(vocabulary, [(space, "a")], unk_token="?"))
    inner.pre_tokenizer = Metaspace(prepend_scheme="first")
    if normalizer:
        inner.normalizer = normalizer
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    codec = PromptCodec(PreTrainedTokenizerFast(tokenizer_object=inner), PromptFormat.PLAIN)
    whole = [*codec.encode(make_prompt("a")), *codec.encode_reply(text, 1, frozenset())]
    assert codec.decode(whole, frozenset()) == f"a{text}"


@pytest.fixture
def tokenizer_with_start(tokenizer):
    """The tokenizer, as Llama's and Gemma's are: it puts a token before any text."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A",
        special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)],
    )
    return tokenizer


def test_a_plain_prompt_begins_as_the_tokenizer_begins_texts(tokenizer_with_start):
    codec = PromptCodec(tokenizer_with_start, PromptFormat.PLAIN)
    expected = tokenizer_with_start("312")["input_ids"]
    assert list(codec.encode(make_prompt("312"))) == expected
    assert expected[0] == tokenizer_with_start.eos_token_id
    # What the environment says later stands in the middle of a text.
    assert list(codec.encode_reply("312", 0, frozenset())) == expected[1:]


def test_a_chat_template_writes_the_first_token_itself_and_it_stands_once(tokenizer_with_start):
    tokenizer_with_start.chat_template = tokenizer_with_start.eos_token + TEMPLATE
    codec = PromptCodec(tokenizer_with_start, PromptFormat.CHAT)
    assert round_trip(codec, "312") == f"{tokenizer_with_start.eos_token}<312>="
    assert codec.encode(make_prompt("312")).count(tokenizer_with_start.eos_token_id) == 1


ROLES = (
    "{% for message in messages %}{{ message.role }}<{{ message.content }}>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
EXAMPLE = (
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3"},
)


class Texts:
    """A tokenizer whose tokens are the letters themselves."""

    added_tokens_decoder: ClassVar = {}

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, **_):
        environment = ImmutableSandboxedEnvironment()
        environment.globals["raise_exception"] = refuse
        template = environment.from_string(self.chat_template)
        return template.render(messages=messages, add_generation_prompt=True)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


def refuse(message):
    raise TemplateError(message)


def render(template, prompt, system_prompt=None):
    codec = PromptCodec(Texts(template), PromptFormat.CHAT, system_prompt)
    return codec.decode(codec.encode(prompt), frozenset())


PARTS = "{% for part in message.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    "template", [ROLES, ROLES.replace("{{ message.content }}", PARTS)], ids=["texts", "parts"]
)
def test_messages_keep_their_roles_and_a_template_gets_the_parts_that_it_wants(template):
    prompt = Prompt(messages=EXAMPLE, answer="")
    assert render(template, prompt) == "user<1>assistant<2>user<3>="
    assert render(template, prompt, "Sort.").startswith("system<Sort.>user<1>")


def test_the_runs_system_prompt_stands_before_what_has_none():
    own = Prompt(messages=({"role": "system", "content": "Add."}, *EXAMPLE), answer="")
    assert render(ROLES, own, "Sort.").startswith("system<Add.>user<1>")


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + ROLES,
        ROLES.replace("in messages", "in messages if message.role != 'system'"),
    ],
    ids=["refused", "dropped"],
)
def test_where_a_template_knows_no_system_role_the_first_user_message_begins_with_it(template):
    assert render(template, make_prompt("1"), "Sort.") == "user<Sort.\n\n1>="


def test_messages_without_a_template_are_shown_as_one_text(tokenizer):
    prompt = Prompt(messages=EXAMPLE, answer="")
    assert prompt.text == "1\n\n2\n\n3"
    codec = PromptCodec(tokenizer, PromptFormat.AUTO)
    assert codec.encode(prompt) == codec.encode(make_prompt("1\n\n2\n\n3"))


def test_a_template_writes_the_same_date_on_every_day_of_a_run(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d%m%Y') }}" + TEMPLATE
    codec = PromptCodec(tokenizer, PromptFormat.CHAT, today=date(2026, 7, 26))
    assert round_trip(codec, "1") == "26072026<1>="


def test_a_plain_prompt_that_is_too_long_loses_its_beginning_and_keeps_its_first_token(
    tokenizer_with_start,
):
    codec = PromptCodec(tokenizer_with_start, PromptFormat.PLAIN)
    start, *text = codec.encode(make_prompt("123456"))
    assert codec.encode(make_prompt("123456"), max_tokens=4) == (start, *text[-3:])
    assert codec.encode(make_prompt("123456"), max_tokens=7) == (start, *text)


def test_a_chat_that_is_too_long_loses_text_of_its_longest_message_alone(chatty):
    codec = PromptCodec(chatty, PromptFormat.CHAT)
    prompt = Prompt(messages=({"role": "user", "content": "123456"}, *EXAMPLE[1:]), answer="")
    whole = codec.encode(prompt)
    shortened = codec.encode(prompt, max_tokens=len(whole) - 2)
    assert len(shortened) == len(whole) - 2
    assert codec.decode(shortened, frozenset()) == "<3456><2><3>="


def test_a_prompt_that_does_not_fit_without_its_text_either_stays_whole(chatty):
    codec = PromptCodec(chatty, PromptFormat.CHAT)
    whole = codec.encode(make_prompt("12"))
    assert codec.encode(make_prompt("12"), max_tokens=2) == whole
    assert codec.encode(make_prompt("12"), max_tokens=-1) == whole


def test_arguments_of_the_template_reach_it_and_an_unknown_one_is_named(chatty):
    chatty.chat_template = TEMPLATE.replace("=", "{{ '-' if enable_thinking is false else '=' }}")
    chat = PromptFormat.CHAT
    codec = PromptCodec(chatty, chat, template_arguments={"enable_thinking": False})
    assert round_trip(codec, "312") == "<312>-"
    assert round_trip(PromptCodec(chatty, chat), "312") == "<312>="
    with pytest.raises(ValueError, match=r"templateArguments\.thinking: True has no effect"):
        PromptCodec(chatty, chat, template_arguments={"thinking": True})
    with pytest.raises(ValueError, match=r"templateArguments\.enable_thinking: .*plain text does"):
        PromptCodec(chatty, PromptFormat.PLAIN, template_arguments={"enable_thinking": True})
