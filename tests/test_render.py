"""From records to token ids."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline.corpus import Record, parse_record
from pipeline.render import BadPrompt, calls_text, plain_text, render_messages, token_ids, tools_text

TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does é.", "parameters": {}}}]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|im_start|> you"},
    {"role": "assistant", "content": "Yes?"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tool_tokenizer(tiny_model_with_tools: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_with_tools)


def record(**value: Any) -> Record:
    out = parse_record({"id": "p", **value}, "f.jsonl:3")
    assert isinstance(out, Record), out
    return out


def test_text_is_tokenised_as_it_is(tokenizer: Any) -> None:
    ids = token_ids(record(text="The quick brown fox"), tokenizer, context_length=1024)
    assert tokenizer.decode(ids) == "The quick brown fox"
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_messages_are_what_the_template_gives(tokenizer: Any) -> None:
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    assert token_ids(record(messages=MESSAGES), tokenizer, context_length=1024) == expected
    assert token_ids(record(messages=MESSAGES, tools=[]), tokenizer, context_length=1024) == expected


def test_tools_go_to_a_template_that_knows_them(tool_tokenizer: Any) -> None:
    expected = tool_tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=True, return_dict=False)
    assert token_ids(record(messages=MESSAGES, tools=TOOLS), tool_tokenizer, context_length=1024) == expected
    assert "<|im_start|>tools\n" in tool_tokenizer.decode(expected)


def test_tools_go_into_the_system_message_otherwise(tokenizer: Any) -> None:
    text = render_messages(record(messages=MESSAGES, tools=TOOLS), tokenizer)
    assert text.startswith(
        "<|im_start|>system\nYou can call these tools:\n"
        '{"type": "function", "function": {"name": "f", "description": "Does é.", "parameters": {}}}\n\n'
        "Be brief.<|im_end|>"
    )
    alone = render_messages(record(messages=MESSAGES[1:], tools=TOOLS), tokenizer)
    assert alone.startswith(f"<|im_start|>system\n{tools_text(TOOLS)}<|im_end|>\n<|im_start|>user\n")


def test_records_are_not_changed(tokenizer: Any) -> None:
    prompt = record(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}], tools=TOOLS)
    before = prompt.content_hash()
    render_messages(prompt, tokenizer)
    assert prompt.content_hash() == before


def test_named_templates(tokenizer: Any, tiny_model: Path) -> None:
    other = AutoTokenizer.from_pretrained(tiny_model)
    other.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools | length }} tools"}
    assert render_messages(record(messages=MESSAGES, tools=TOOLS), other) == "1 tools"
    assert render_messages(record(messages=MESSAGES), other) == render_messages(record(messages=MESSAGES), tokenizer)


def test_without_a_template(tiny_model: Path) -> None:
    bare = AutoTokenizer.from_pretrained(tiny_model)
    bare.chat_template = None
    text = render_messages(record(messages=MESSAGES, tools=[{"a": 1}]), bare)
    assert text == ('[\n {\n  "a": 1\n }\n]\n<system>\nBe brief.\n<user>\nHello <|im_start|> you\n<assistant>\nYes?')
    assert text == plain_text(MESSAGES, [{"a": 1}])


def test_tool_calls_become_text_for_a_template_that_ignores_them(tokenizer: Any) -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"function": {"name": "g", "arguments": "{"}},
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [MESSAGES[1], said, {"role": "tool", "content": "3"}]
    text = render_messages(record(messages=messages), tokenizer)
    assert calls_text(calls) == (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": "{"}\n</tool_call>'
    )
    assert f"<|im_start|>assistant\n{calls_text(calls)}<|im_end|>\n<|im_start|>tool\n3" in text
    messages[1] = {**messages[1], "content": "Wait."}
    assert f"assistant\nWait.\n{calls_text(calls)}<|im_end|>" in render_messages(record(messages=messages), tokenizer)


def test_parts_of_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hello "}, "you"]
    as_parts = render_messages(record(messages=[{"role": "user", "content": parts}]), tokenizer)
    assert as_parts == render_messages(record(messages=[{"role": "user", "content": "Hello you"}]), tokenizer)
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    with pytest.raises(BadPrompt, match="not text"):
        render_messages(record(messages=image), tokenizer)


def test_token_ids(tokenizer: Any) -> None:
    prompt = record(token_ids=[5, 383, 0])
    assert token_ids(prompt, tokenizer, context_length=3) == [5, 383, 0]
    assert token_ids(prompt, tokenizer, context_length=2, max_tokens=2) == [5, 383]
    assert token_ids(record(token_ids=[500]), tokenizer, context_length=3, vocab_size=512) == [500]
    with pytest.raises(BadPrompt) as error:
        token_ids(record(token_ids=[1, 384]), tokenizer, context_length=3)
    assert error.value.reason == "holds token id 384, which is not in the vocabulary of 384 tokens"
    assert str(error.value) == f"f.jsonl:3: the prompt 'p' {error.value.reason}"
    assert error.value.source == "f.jsonl:3"


def test_too_long(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = record(text="fox " * 3000)
    with pytest.raises(BadPrompt, match=r"has \d{4,} tokens, over the model's context length of 1024"):
        token_ids(prompt, tokenizer, context_length=1024)
    assert len(token_ids(prompt, tokenizer, context_length=1024, max_tokens=1024)) == 1024
    with pytest.raises(BadPrompt, match="1025 tokens"):
        token_ids(prompt, tokenizer, context_length=1024, max_tokens=1025)
    assert capfd.readouterr() == ("", "")


def test_nothing_left(tokenizer: Any) -> None:
    with pytest.raises(BadPrompt, match="empty"):
        token_ids(record(text="x"), tokenizer, context_length=10, max_tokens=0)
    tokenizer_that_drops = type("T", (), {"encode": lambda *_, **__: [], "__len__": lambda _: 10})()
    with pytest.raises(BadPrompt, match="empty"):
        token_ids(record(text="x"), tokenizer_that_drops, context_length=10)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('Conversation roles must alternate') }}", "{{ messages[0].x.y }}", "{% if %}", "{{ 1 / 0 }}"],
)
def test_a_template_that_refuses(template: str, tiny_model: Path) -> None:
    strict = AutoTokenizer.from_pretrained(tiny_model)
    strict.chat_template = template
    with pytest.raises(BadPrompt, match="refused by the model's chat template") as error:
        token_ids(record(messages=MESSAGES), strict, context_length=10)
    assert "\n" not in str(error.value) and error.value.reason in str(error.value)


def test_real_template(smollm2_gguf: Path, make_tiny_model: Callable[..., Path]) -> None:
    """SmolLM2's own template, from the file's metadata: it adds a system message and ignores tools."""
    from pipeline.target import load_tokenizer, resolve_model

    real = load_tokenizer(resolve_model(smollm2_gguf))
    assert render_messages(record(messages=MESSAGES[1:2], tools=TOOLS), real) == (
        f"<|im_start|>system\n{tools_text(TOOLS)}<|im_end|>\n<|im_start|>user\nHello <|im_start|> you<|im_end|>\n"
    )
    expected = real.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    assert token_ids(record(messages=MESSAGES), real, context_length=8192) == expected
