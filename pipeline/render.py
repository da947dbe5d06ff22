"""From a record to the token ids that the target reads.

messages   the model's own chat template, without a generation prompt: what is stored is a prefix of whatever follows.
           A template that does not name `tools` gets them as text in front of the system message (`tools_text`);
           one that does not name `tool_calls` gets them as text after the message's content (`calls_text`).
           A model without a chat template gets `plain_text`.
text       the tokenizer, with no special tokens added (those written out in the text are read as such).
token_ids  as they are.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from codec.errors import UserError
from pipeline.corpus import Record

Message = Mapping[str, Any]


class BadPrompt(UserError):
    """A record that gives no usable prompt. `.reason` is half a sentence, `.source` is "file:line"."""

    def __init__(self, record: Record, reason: str) -> None:
        """The message names place, id and reason."""
        super().__init__(f"{record.source}: the prompt {record.id!r} {reason}")
        self.reason = reason
        self.source = record.source


def token_ids(
    record: Record,
    tokenizer: Any,
    *,
    max_tokens: int | None = None,
    context_length: int,
    vocab_size: int | None = None,
) -> list[int]:
    """The prompt's token ids, at most `max_tokens` of them (the rest is cut off at the end).

    tokenizer: of transformers. vocab_size: of the model; without it the tokenizer's. Raises BadPrompt when nothing is
    left, an id is out of the vocabulary, the template refuses the messages, or the context length is exceeded.
    """
    if record.kind == "token_ids":
        ids = list(record.payload["token_ids"])
    else:
        text = record.payload["text"] if record.kind == "text" else render_messages(record, tokenizer)
        ids = encode(tokenizer, text)
    if max_tokens is not None:
        ids = ids[:max_tokens]
    if not ids:
        raise BadPrompt(record, "is empty: it gives no token")
    if len(ids) > context_length:
        raise BadPrompt(record, f"has {len(ids)} tokens, over the model's context length of {context_length}")
    size = len(tokenizer) if vocab_size is None else vocab_size
    if (worst := max(ids)) >= size or min(ids) < 0:
        raise BadPrompt(record, f"holds token id {worst}, which is not in the vocabulary of {size} tokens")
    return ids


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, with nothing added and no warning about its length."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def render_messages(record: Record, tokenizer: Any) -> str:
    """The text of a record of messages as the model is to read it. Raises BadPrompt."""
    tools: list[dict[str, Any]] = record.payload.get("tools", [])
    messages = [_as_text(record, message) for message in record.payload["messages"]]
    if not tokenizer.chat_template:
        return plain_text(_with_calls(messages), tools)
    try:
        template = tokenizer.get_chat_template(tools=tools or None)
        if not re.search(r"\btool_calls\b", template):
            messages = _with_calls(messages)
        if tools and not re.search(r"\btools\b", template):
            messages, tools = _with_tools(messages, tools), []
        text: str = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        return text
    except Exception as error:  # a template is a program of the model's: it can raise anything, from jinja2 or itself
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise BadPrompt(record, f"is refused by the model's chat template ({reason})") from error


def plain_text(messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
    """The form for models without a chat template: the tools as indented JSON, then `<role>`, newline, content."""
    parts = [json.dumps(tools, indent=1)] if tools else []
    return "\n".join(parts + [f"<{m['role']}>\n{m.get('content') or ''}" for m in messages])


def tools_text(tools: Sequence[Any]) -> str:
    """The form in which tools stand in a system message: a heading, then one JSON schema a line."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return "\n".join(["You can call these tools:", *lines])


def calls_text(calls: Sequence[Any]) -> str:
    """The form in which tool calls stand in a message: a <tool_call> element with name and arguments for each."""
    lines = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):  # arguments that are no JSON stay the string they are
                function = {**function, "arguments": json.loads(function["arguments"])}
        lines.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(lines)


def _as_text(record: Record, message: Message) -> dict[str, Any]:
    """Content given as a list of text parts becomes one string; templates for plain models expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": content or ""}
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise BadPrompt(record, f"has a part that is not text in a message of {message['role']!r}")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    front = tools_text(tools)
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{front}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": front}, *messages]


def _with_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = calls_text(calls)
            content = f"{message['content']}\n{text}" if message["content"] else text
            message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
        out.append(message)
    return out
