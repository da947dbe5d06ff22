"""Recompression from options to what readers get, in one process: new weights, another tokenizer, another rung, tenants."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pipeline
from codec.errors import DataError, UserError
from jobs.verify import main as verify
from pipeline import recompress as module
from pipeline.collect import collect, find_garbage
from pipeline.current import read_pointers
from pipeline.model_source import resolve_model
from pipeline.options import Options
from pipeline.prepare import prepare
from pipeline.recompress import RecompressOptions, recompress
from pipeline.run import Consoles
from pipeline.run import run as compress
from pipeline.runs import list_runs, read_run
from pipeline.store import Store
from pipeline.target import load_target, run_format
from tests.conftest import TOOLS_TEMPLATE, write_tiny_llama, write_tokenizer
from tests.made_store import CHUNK, RECORDS, SHARED, make_old, numbers, options_of, without_ray
from tests.stored import same

pytestmark = pytest.mark.slow

TEXT = {"id": "t", "text": "The quick brown fox jumps over the lazy dog. " * 4}
CHAT = {"id": "m", "messages": [{"role": "user", "content": "What does it read? " * 8}]}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


class Site:
    """A model's folder, which is overwritten in place as models are, a store, and the jobs on them."""

    def __init__(self, folder: Path, records: list[dict[str, Any]], **changes: Any) -> None:
        self.model = folder / "mymodel"
        self.weights(0)
        write_tokenizer(self.model)
        self.options: Options = replace(options_of(self.model, folder, records), **changes)
        self.store = Store(self.options.store)
        self.said = ""

    def weights(self, seed: int) -> None:
        write_tiny_llama(self.model, seed=seed)

    def compress(self, **changes: Any) -> int:
        return self._run(compress, replace(self.options, **changes))

    def recompress(self, **changes: Any) -> int:
        given = {"model": str(self.model)} | changes
        return self._run(recompress, RecompressOptions(self.options.store, **given))

    def _run(self, job: Any, options: Any) -> int:
        text = io.StringIO()
        console = Console(file=text, width=400)
        try:
            status: int = job(options, Consoles(console, console))
        finally:
            self.said = text.getvalue()
        return status

    def fingerprint(self) -> bytes:
        return resolve_model(self.model).fingerprint(self.options.cache_dtype or "bf16")

    def truth(self, ids: list[int]) -> Any:
        """K and V as the target computes them, in the format and with the scales that the store has for it."""
        import torch

        job = prepare(self.options).job
        target = load_target(job.model, run_format(job.model, job.cache_format)).with_cache(
            job.cache_format, job.cache_scales
        )
        cache = target.new_cache()
        for part in torch.tensor(ids).split(CHUNK):
            target.prefill(cache, part)
        return target.read(cache, 0, len(ids))

    def restored(self, ids: list[int], model: str = "mymodel") -> Any:
        return pipeline.restore(self.store, model, ids)

    def whole(self) -> bool:
        return verify(["--store", self.options.store, "--deep"]) == 0


A = SHARED + numbers(2, 30)


def test_new_weights_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, [*RECORDS, TEXT, CHAT])
    assert site.compress() == 0
    old, first = site.fingerprint(), site.truth(A)
    assert site.recompress() == 0 and "unchanged" in site.said
    site.weights(5)
    new, second = site.fingerprint(), site.truth(A)
    assert site.compress(limit=1) == 0 and "the weights of mymodel have changed" in site.said
    assert same(site.restored(A).load(), first), "readers by name stay where they are"

    # Interrupted between verification and the pointer: readers have the old generation, and the new one is hidden.
    seen: list[bool] = []

    def cut(*_: Any, **__: Any) -> None:
        seen.append(same(site.restored(A).load(), first))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "point", cut)
        with pytest.raises(KeyboardInterrupt):
            site.recompress()
    assert seen == [True] and same(site.restored(A).load(), first)
    reader = pipeline.Restorer(site.store, "mymodel")
    begun = reader.restore(A)
    assert site.recompress() == 0 and "readers of mymodel now follow" in site.said

    assert same(site.restored(A).load(), second) and site.restored(A).generation.target == new
    assert same(begun.load(), first), "what was begun ends with the generation it began with"
    assert same(reader.restore(A).load(), first)
    reader.refresh()
    assert reader.target == new and same(reader.restore(A).load(), second)
    assert same(site.restored(A, old.hex()).load(), first), "the old generation is there for a grace period"
    assert site.whole()

    assert {item.kind for item in find_garbage(site.store, 3600.0).items} == set()
    make_old(site.store)
    collect(site.store, 3600.0, lambda text: None)
    left = list(site.store.list())
    assert not any(old.hex() in path for path in left if not path.startswith("current/")), left
    assert same(site.restored(A).load(), second) and site.whole()
    collect(site.store, 3600.0, lambda text: None)
    assert len(list(site.store.list("predictors"))) == 1
    records = [r for path in list_runs(site.store) if (r := read_run(site.store, path)).job != "verify"]
    assert sorted((r.job, r.outcome) for r in records) == [
        ("compress", "ok"), ("compress", "ok"), ("recompress", "failed"), ("recompress", "ok"),
    ]  # fmt: skip
    last = next(r for r in records if (r.job, r.outcome) == ("recompress", "ok"))
    assert last.fingerprint == new.hex() and last.chunks_verified == last.chunks_reused + last.chunks_new - 2
    assert last.scalars and last.bytes and not last.verification_failures


def test_another_tokenizer_and_template(tmp_path: Path) -> None:
    site = Site(tmp_path, [TEXT, CHAT, RECORDS[2]])
    assert site.compress() == 0
    site.weights(6)
    write_tokenizer(site.model, chat_template=TOOLS_TEMPLATE, vocab_size=300)
    with pytest.raises(UserError, match=r"1 prompts were given as token ids.*--token-ids keep"):
        site.recompress()
    assert read_pointers(site.store).staged == {}
    assert site.recompress(token_ids="skip") == 0
    assert site.restored(RECORDS[2]["token_ids"]).tokens == 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(site.model)
    ids = tokenizer.encode(TEXT["text"], add_special_tokens=False)
    assert site.restored(ids).tokens == len(ids) and same(site.restored(ids).load(), site.truth(ids))
    assert site.whole()


def test_tenants_and_cut_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALT_ONE", "hush-one")
    site = Site(tmp_path, [RECORDS[0], RECORDS[2] | {"salt": "hush-one"}, TEXT], max_tokens=40)
    assert site.compress() == 0
    site.weights(7)
    with pytest.raises(UserError, match=r"1 prompts are of tenants whose salts were not given.*--salt-env"):
        site.recompress()
    assert site.recompress(salt_env=("SALT_ONE",)) == 0 and "hush" not in site.said
    mine = RECORDS[2]["token_ids"]
    found = pipeline.restore(site.store, "mymodel", mine, salt=b"hush-one")
    assert found.tokens == 40 and same(found.load(), site.truth(mine[:40]))
    assert site.restored(mine).tokens == 0 and site.restored(A).tokens == 40
    assert b"hush" not in b"".join(site.store.get(path) for path in site.store.list("runs"))


def test_another_rung_from_the_store_alone(tmp_path: Path) -> None:
    site = Site(tmp_path, RECORDS)
    assert site.compress() == 0 and site.compress(predictor="fp8", limit=1) == 0
    truth, before = site.truth(A), read_pointers(site.store).current("mymodel", "bf16")
    shutil.rmtree(site.model)
    with pytest.raises(UserError, match="no calibration of --predictor int4"):
        site.recompress(model=None, codec_only=True, predictor="int4")
    assert site.recompress(model=None, codec_only=True, predictor="fp8") == 0
    after = read_pointers(site.store).current("mymodel", "bf16")
    assert (
        before is not None and after is not None and before.target == after.target and before.profile != after.profile
    )
    found = site.restored(A)
    assert found.generation.profile == after.profile and same(found.load(), truth)
    assert site.whole()
    with pytest.raises(UserError, match="was replaced on"):
        write_tiny_llama(site.model)
        write_tokenizer(site.model)
        site.compress()
    assert site.compress(predictor="fp8") == 0
    # The same calibration for another coder, and back to the first rung.
    shutil.rmtree(site.model)
    assert site.recompress(model=None, codec_only=True, coder="constriction-ans24/0.5") == 0
    assert same(site.restored(A).load(), truth)
    assert (
        site.recompress(model=None, codec_only=True, coder="constriction-ans24/0.5") == 0 and "unchanged" in site.said
    )
    assert site.recompress(model=None, codec_only=True, predictor="int8", coder="rans24x64-1") == 0
    now = read_pointers(site.store).current("mymodel", "bf16")
    assert now is not None and now.pair == before.pair and same(site.restored(A).load(), truth)


def test_a_damaged_old_chunk_moves_no_pointer(tmp_path: Path) -> None:
    site = Site(tmp_path, RECORDS)
    assert site.compress() == 0 and site.compress(predictor="fp8", limit=1) == 0
    before = read_pointers(site.store).current("mymodel", "bf16")
    assert before is not None
    several: dict[str, list[str]] = {}
    for path in site.store.list("blobs"):
        several.setdefault(path.rpartition("/")[2], []).append(path)
    path = next(paths[0] for paths in several.values() if len(paths) == 1)  # not in the new generation yet
    data = site.store.get(path)
    site.store.delete(path)
    site.store.put_new(path, data[:-20] + bytes(20))
    with pytest.raises(DataError):
        site.recompress(model=None, codec_only=True, predictor="fp8")
    assert read_pointers(site.store).current("mymodel", "bf16") == before


def test_prompts_of_ones_own_and_a_name_that_changed(tmp_path: Path) -> None:
    """--prompts takes these instead of those that are kept; --as points readers of an old name to a model of another."""
    site = Site(tmp_path, RECORDS)
    assert site.compress() == 0
    first = site.truth(A)
    corpus = tmp_path / "own.jsonl"
    corpus.write_text(json.dumps({"id": "own", "token_ids": A}) + "\n")
    renamed = tmp_path / "renamed"
    shutil.copytree(site.model, renamed)
    write_tiny_llama(renamed, seed=7)
    assert site.recompress(model=str(renamed), name="mymodel", prompts=str(corpus)) == 0, site.said
    found = site.restored(A)
    assert found.tokens == len(A) and found.generation.target == resolve_model(renamed).fingerprint("bf16")
    assert not same(found.load(), first) and site.whole()
