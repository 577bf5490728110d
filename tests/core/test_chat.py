"""One conversation has one sequence of ids, whichever way it comes."""

import datetime
import json

import pytest

from rm_core.chat import Renderer, RenderError, RenderingRules, tokenizer_hash, truncate_left
from tests.conftest import CHATML, byte_tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]

LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
)
QWEN3 = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim"
    " + '<end_of_turn>\n' }}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def family_tokenizer(name: str):
    specials = {
        "llama3": ("<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), LLAMA3),
        "qwen3": (None, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"), QWEN3),
        "gemma3": ("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), GEMMA),
        "mistral": ("<s>", "</s>", ("[INST]", "[/INST]"), MISTRAL),
        "smollm2": ("<|im_start|>", "<|im_end|>", (), CHATML),
    }
    bos, eos, extra, template = specials[name]
    adds_bos = name in ("llama3", "gemma3", "mistral")
    return byte_tokenizer(template, bos=bos, eos=eos, pad=eos, extra=extra, adds_bos=adds_bos)


FAMILIES = ["llama3", "qwen3", "gemma3", "mistral", "smollm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_and_templated_text_give_identical_ids(family):
    tokenizer = family_tokenizer(family)
    renderer = Renderer.for_tokenizer(tokenizer)
    ids = renderer.render_conversation(CHAT)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, date_string="26 Jul 2024")
    assert renderer.render_templated(text) == ids
    assert renderer.render_templated(text.rstrip("\n")) == ids  # a policy's own text stops at the end token
    assert renderer.render_text(text, text_as="raw") == ids
    if renderer.rules.chat_begins_with_bos:
        assert renderer.render_templated(text.removeprefix(tokenizer.bos_token)) == ids  # verl strips the BOS
    assert ids.count(tokenizer.bos_token_id or -1) == text.count(tokenizer.bos_token or "\0")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_ends_at_its_end_of_turn_token(family):
    tokenizer = family_tokenizer(family)
    renderer = Renderer.for_tokenizer(tokenizer)
    expected = {"llama3": "<|eot_id|>", "gemma3": "<end_of_turn>", "mistral": "</s>"}.get(family, "<|im_end|>")
    assert renderer.rules.end_of_turn == expected
    assert tokenizer.convert_ids_to_tokens(renderer.render_conversation(CHAT)[-1]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unfinished_answer_has_no_end_token(family):
    tokenizer = family_tokenizer(family)
    renderer = Renderer.for_tokenizer(tokenizer)
    ids = renderer.render_conversation(CHAT, finished=False)
    assert renderer.render_conversation(CHAT)[: len(ids)] == ids
    assert tokenizer.decode(ids).endswith("Yo")
    raw = renderer.render("Hi", " Yo", finished=False)
    assert renderer.render("Hi", " Yo") == [*raw, tokenizer.eos_token_id]


def test_end_template_keeps_what_the_template_prints_last():
    tokenizer = family_tokenizer("smollm2")
    renderer = Renderer.for_tokenizer(tokenizer, end="template")
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert renderer.render_conversation(CHAT) == whole
    assert renderer.render_templated(text.rstrip("\n")) == whole  # the missing tail is appended
    assert renderer.render_templated(text.rstrip("\n").removesuffix("<|im_end|>")) == whole


@pytest.mark.parametrize("family", ["llama3", "gemma3", "mistral"])
def test_a_raw_text_has_one_bos_and_one_end(family):
    tokenizer = family_tokenizer(family)
    renderer = Renderer.for_tokenizer(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = renderer.render_text("abc")
    assert ids[0] == bos
    assert ids[-1] == eos
    assert renderer.render_text(f"{tokenizer.bos_token}abc{tokenizer.eos_token}") == ids


def test_strings_are_tokenised_together_and_text_as_chat_wraps_them():
    tokenizer = family_tokenizer("smollm2")
    renderer = Renderer.for_tokenizer(tokenizer)
    assert renderer.render("ab", "cd") == renderer.render_text("abcd")
    wrapped = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert renderer.render("ab", "cd", text_as="chat") == renderer.render_conversation(wrapped)
    chat_rules = Renderer.for_tokenizer(tokenizer, text_as="chat")
    assert chat_rules.render("ab", "cd") == renderer.render_conversation(wrapped)
    assert chat_rules.render("ab", "cd", text_as="raw") == renderer.render("ab", "cd")


def test_todays_date_does_not_change_the_ids():
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    tokenizer = byte_tokenizer(template)
    ids = Renderer.for_tokenizer(tokenizer).render_conversation(CHAT)
    assert tokenizer.decode(ids).startswith("26 Jul 2024")
    other = Renderer.for_tokenizer(tokenizer, date=datetime.date(2030, 1, 1))
    assert tokenizer.decode(other.render_conversation(CHAT)).startswith("01 Jan 2030")


def test_rules_record_what_the_template_does_with_thoughts():
    assert Renderer.for_tokenizer(family_tokenizer("qwen3")).rules.thinking == "dropped"
    assert Renderer.for_tokenizer(family_tokenizer("smollm2")).rules.thinking == "kept"


def test_text_parts_are_joined_and_images_refused_by_name():
    renderer = Renderer.for_tokenizer(family_tokenizer("smollm2"))
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, CHAT[1]]
    assert renderer.render_conversation(parts) == renderer.render_conversation(CHAT)
    with pytest.raises(RenderError, match=r"messages\[0\]\.content\[0\]: has type 'image_url'"):
        renderer.render_conversation([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, CHAT[1]])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (["x"], "messages[0]"),
        ([{"role": "user", "content": "a\ud800"}], "text"),
    ],
)
def test_bad_messages_name_the_field(messages, field):
    renderer = Renderer.for_tokenizer(family_tokenizer("smollm2"))
    with pytest.raises(RenderError) as caught:
        renderer.render_conversation(messages)
    assert caught.value.field == field


def test_a_role_that_the_template_refuses_or_drops_is_an_error():
    system = [{"role": "system", "content": "Obey"}, *CHAT]
    with pytest.raises(RenderError, match="System role not supported"):
        Renderer.for_tokenizer(family_tokenizer("gemma3")).render_conversation(system)
    with pytest.raises(RenderError, match=r"messages\[0\]\.role: the chat template does not print the role 'system'"):
        Renderer.for_tokenizer(family_tokenizer("mistral")).render_conversation(system)


CALLS = CHATML.replace("message['content'] +", "message['content'] + (message.get('tool_calls') or '') | string +")


def test_a_tool_call_that_the_template_drops_is_an_error_even_where_a_turn_says_its_name():
    """With it, two answers that differ in their calls alone would have one reward."""

    def conversation(*names):
        calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        question = {"role": "user", "content": " Call search, not find "}
        return [question, {"role": "assistant", "content": None, "tool_calls": calls}]

    renderer = Renderer.for_tokenizer(family_tokenizer("smollm2"))
    for name in ("search", "get_weather"):
        with pytest.raises(RenderError) as caught:
            renderer.render_conversation(conversation(name))
        assert caught.value.field == "messages[1].tool_calls[0]"
        assert caught.value.message == f"the chat template does not print the call of {name!r}"
    for call in ({}, {"function": "search"}, "search"):
        with pytest.raises(RenderError, match=r"messages\[0\]\.tool_calls\[0\]: names no function"):
            renderer.render_conversation([{"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(RenderError, match=r"messages\[0\]\.tool_calls: must be a list"):
        renderer.render_conversation([{"role": "assistant", "content": "", "tool_calls": 5}])
    printing = Renderer.for_tokenizer(byte_tokenizer(CALLS))
    ids = printing.render_conversation(conversation("search", "find"))
    assert ids != printing.render_conversation(conversation("search", "lookup"))
    first = "{{ message['tool_calls'][0]['function']['name'] if message.get('tool_calls') else message['content'] }}"
    only_first = Renderer.for_tokenizer(byte_tokenizer("{% for message in messages %}" + first + "{% endfor %}"))
    with pytest.raises(RenderError, match=r"tool_calls\[1\]: the chat template does not print the call of 'lookup'"):
        only_first.render_conversation(conversation("search", "lookup"))


def test_without_a_template_messages_are_refused_and_text_works():
    renderer = Renderer.for_tokenizer(byte_tokenizer(None))
    assert renderer.rules.chat_template is None
    with pytest.raises(RenderError, match="no chat template"):
        renderer.render_conversation(CHAT)
    assert renderer.render_templated("ab") == renderer.render_text("ab")


def test_rules_survive_json_and_detect_another_template():
    tokenizer = family_tokenizer("smollm2")
    rules = Renderer.for_tokenizer(tokenizer).rules
    assert RenderingRules.model_validate(json.loads(rules.model_dump_json())) == rules
    tokenizer.chat_template = CHATML.replace("helpful", "harmful")
    with pytest.raises(RenderError) as caught:
        Renderer(tokenizer, rules).check_rules()
    assert caught.value.field == "chat_template"


def test_a_tokenizers_hash_ignores_padding_state_and_sees_new_tokens():
    tokenizer = family_tokenizer("smollm2")
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != before


def test_truncation_keeps_the_bos_and_the_end():
    assert truncate_left([9, 1, 2, 3, 4], 3, bos_id=9) == [9, 3, 4]
    assert truncate_left([9, 1, 2, 3, 4], 3, bos_id=None) == [2, 3, 4]
    assert truncate_left([1, 2], 3) == [1, 2]


def test_a_long_pair_loses_whole_turns_first_and_never_its_end():
    tokenizer = family_tokenizer("smollm2")
    renderer = Renderer.for_tokenizer(tokenizer)
    prompt = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "old " * 20},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "new"},
    ]
    chosen, rejected = [{"role": "assistant", "content": "good"}], [{"role": "assistant", "content": "worse one"}]
    short = [prompt[0], prompt[3]]
    limit = len(renderer.render(short, rejected))
    assert renderer.render_pair(prompt, chosen, rejected, max_length=limit) == (
        renderer.render(short, chosen),
        renderer.render(short, rejected),
        True,
    )
    both = renderer.render_pair(prompt, chosen, rejected, max_length=limit - 4)
    assert both[1] == truncate_left(renderer.render(short, rejected), limit - 4, tokenizer.bos_token_id)
    assert both[0][-1] == both[1][-1] == tokenizer.eos_token_id
    assert renderer.render_pair(prompt, chosen, rejected, max_length=10_000)[2] is False


@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_a_short_answer_stays_whole_beside_one_that_is_too_long(bos: str | None):
    """Prompt "pp" (2 tokens), answers of 30 and 4, and an end token each; 12 may stay. Cutting 21 from both would leave
    nothing of the short answer, which fits: it loses the prompt alone, and only what the two share."""
    tokenizer = byte_tokenizer(None, bos=bos, adds_bos=bos is not None)
    renderer = Renderer.for_tokenizer(tokenizer)
    long, short, cut = renderer.render_pair("pp", "x" * 30, "yyyy", max_length=12)
    assert cut
    assert len(long) == 12
    assert tokenizer.decode(short, skip_special_tokens=True) == "yyyy"
    assert (long[-1], short[-1]) == (tokenizer.eos_token_id, tokenizer.eos_token_id)
    assert (short[0] == tokenizer.bos_token_id) is (bos is not None)
