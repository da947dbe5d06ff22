"""A model continues from a restored cache as from its own: same tokens, same next-token logits, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeline
from codec.errors import UserError
from pipeline.piece_cache import PieceLayer
from pipeline.restoration.restorer import Restoration
from tests.stored import CHUNK, Kept, tokens_of

PROMPT = tokens_of(1, 3 * CHUNK + 9)
QUESTION = tokens_of(2, 7)
NEW = 6


def causal(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    """Of the next token, after reading `ids` in one pass."""
    out: torch.Tensor = model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits[0, -1]
    return out


def generated(model: Any, cache: Any, ids: list[int]) -> list[int]:
    out: list[int] = model.generate(torch.tensor([ids]), cache=cache, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return out


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def continues(model: Any, fresh: Callable[[], Any], restored: Callable[[], Any], prompt: list[int]) -> None:
    """From the cache that the run which was stored had, and from the restored one."""
    assert equal(logits(model, fresh(), QUESTION), logits(model, restored(), QUESTION))
    one, two = fresh(), restored()
    want, got = (generated(model, cache, prompt + QUESTION) for cache in (one, two))
    assert want == got and len(want) > len(prompt + QUESTION)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert all(equal(*both) for both in zip(whole(a), whole(b), strict=True))


def whole(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer of the target's own cache, or of one that was restored."""
    k, v = layer.whole() if isinstance(layer, PieceLayer) else (layer.keys, layer.values)
    return k, v


@pytest.mark.parametrize(
    ("kind", "cache", "mode"),
    [
        ("fp8", "bf16", ""), ("linear", "fp32", ""), ("int8", "fp8_e4m3", "head"), ("linear", "fp8_e5m2", "tensor"),
        ("static", "fp8_e4m3", "none"),
    ],
)  # fmt: skip
def test_generating_continues_as_if_nothing_had_happened(
    tiny_model: Path, tmp_path: Path, kind: str, cache: str, mode: str
) -> None:
    kept = Kept(tiny_model, tmp_path, kind=kind, cache=cache, mode=mode)
    kept.put({"prompt": PROMPT})
    model = causal(tiny_model, kept.target.dtype)
    found = pipeline.restore(kept.store, tiny_model, PROMPT + QUESTION)
    assert found.tokens == len(PROMPT)
    continues(model, lambda: kept.cache(PROMPT), lambda: found.as_dynamic_cache(model), PROMPT)
    # A bit of what was restored decides over the logits: the comparison above can fail.
    spoilt = found.as_dynamic_cache(model)
    spoilt.layers[0].keys[0, 0, 0] += 1
    assert not equal(logits(model, spoilt, QUESTION), logits(model, kept.cache(PROMPT), QUESTION))


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    found = Kept(tiny_model, tmp_path_factory.mktemp("kept"), kind="static")
    found.put({"prompt": PROMPT})
    return found


def test_one_token_is_left_of_a_prompt_that_is_stored_to_its_end(kept: Kept, tiny_model: Path) -> None:
    model = causal(tiny_model, torch.bfloat16)
    found = pipeline.restore(kept.store, tiny_model, PROMPT)
    cache = found.as_dynamic_cache(model)
    assert cache.get_seq_length() == len(PROMPT) - 1
    assert found.as_dynamic_cache(model, leave=0).get_seq_length() == len(PROMPT)
    own = kept.cache(PROMPT)
    own.crop(-1)
    assert generated(model, cache, PROMPT) == generated(model, own, PROMPT)


def test_without_a_stored_prefix_the_cache_is_empty_and_generating_works(kept: Kept, tiny_model: Path) -> None:
    model = causal(tiny_model, torch.bfloat16)
    found: Restoration = pipeline.restore(kept.store, tiny_model, QUESTION)
    cache = found.as_dynamic_cache(model)
    assert cache.get_seq_length() == 0
    assert generated(model, cache, QUESTION) == generated(model, None, QUESTION)


def test_a_model_that_the_cache_is_not_of_is_refused(
    kept: Kept, tiny_model: Path, make_tiny_model: Callable[..., Path]
) -> None:
    found = pipeline.restore(kept.store, tiny_model, PROMPT)
    with pytest.raises(UserError, match="layers of"):
        found.as_dynamic_cache(causal(make_tiny_model(num_hidden_layers=2), torch.bfloat16))
    with pytest.raises(UserError, match="float32"):
        found.as_dynamic_cache(causal(tiny_model, torch.float32))
    part = pipeline.restore(kept.store, tiny_model, PROMPT, heads=(0, 1))
    with pytest.raises(UserError, match="all layers and heads"):
        part.as_dynamic_cache(causal(tiny_model, torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bf16", "fp8_e4m3"])
def test_the_real_model_continues_from_its_restored_cache(smollm2_gguf: Path, tmp_path: Path, cache: str) -> None:
    from transformers import AutoTokenizer

    from pipeline.model_source import location, resolve_model
    from pipeline.model_weights import load_model

    source = resolve_model(smollm2_gguf)
    args, keywords = location(source)
    tokenizer = AutoTokenizer.from_pretrained(*args, **keywords)
    text = Path(pipeline.__file__).with_name("store.py").read_text()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    prompt, train = ids[:72], [ids[400:496]]
    kept = Kept(smollm2_gguf, tmp_path, kind="int8", loop="open", cache=cache, calibration=train)
    kept.put({"prompt": prompt})
    model = load_model(source, torch.bfloat16, None).eval()
    question = tokenizer.encode("\n# In one sentence, this file", add_special_tokens=False)
    found = pipeline.restore(kept.store, smollm2_gguf, prompt + question, cache_dtype=cache)
    assert found.tokens == len(prompt)
    assert equal(logits(model, kept.cache(prompt), question), logits(model, found.as_dynamic_cache(model), question))
    want, got = (generated(model, c, prompt + question) for c in (kept.cache(prompt), found.as_dynamic_cache(model)))
    assert want == got
