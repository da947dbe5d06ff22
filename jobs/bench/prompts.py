"""Prompts of equal length for benchmarks, rendered without a chat template.

Plain text keeps figures comparable between models: a record's `text`, or its tools as JSON and then its messages, each
under its role in angle brackets. No special tokens are added. lab/rate_reference.py renders the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from codec.errors import UserError
from pipeline import render
from pipeline.corpus import BadRecord, Record, list_corpus, read_corpus


def plain_text(payload: Mapping[str, Any]) -> str:
    """The text of a record that has `text`, or `messages` and perhaps `tools`."""
    if "text" in payload:
        return str(payload["text"])
    return render.plain_text(payload["messages"], payload.get("tools", ()))


def read_prompts(uri: str, tokenizer: Any, *, tokens: int, count: int) -> list[Tensor]:
    """The first `count` prompts of a corpus that have at least `tokens` tokens, cut there: int64 [tokens] each.

    Raises UserError for a bad record before the last prompt taken, or too few prompts of that length.
    """
    long_enough = (ids[:tokens] for ids in _token_ids(uri, tokenizer) if len(ids) >= tokens)
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in islice(long_enough, count)]
    if len(prompts) < count:
        raise UserError(
            f"the corpus {uri} has {len(prompts)} prompts of {tokens} tokens or more where {count} are asked for"
        )
    return prompts


def _token_ids(uri: str, tokenizer: Any) -> Iterator[list[int]]:
    for file in list_corpus(uri):
        for record in read_corpus(file):
            if isinstance(record, BadRecord):
                raise UserError(f"{record.source}: {record.reason}")
            yield _of(record, tokenizer)


def _of(record: Record, tokenizer: Any) -> list[int]:
    if record.kind == "token_ids":
        return list(record.payload["token_ids"])
    # verbose: a warning about texts over the model's context length, which are cut here
    ids: list[int] = tokenizer(plain_text(record.payload), add_special_tokens=False, verbose=False).input_ids
    return ids
