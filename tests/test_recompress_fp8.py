"""Recompression of FP8 caches, in one process: new weights get scales of their own, another rung keeps scales and bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codec.errors import UserError
from pipeline import index
from pipeline.collect import collect
from pipeline.current import read_pointers
from pipeline.prepare import prepare
from tests.made_store import RECORDS, files, make_old, options_of, without_ray
from tests.stored import same
from tests.test_recompress import A, Site

CACHE = "fp8_e4m3"
B = RECORDS[1]["token_ids"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


def pair(site: Site) -> tuple[bytes, bytes]:
    """The generation that readers follow."""
    entry = read_pointers(site.store).current("mymodel", CACHE)
    assert entry is not None
    return entry.pair


def rows(site: Site, of: tuple[bytes, bytes]) -> dict[bytes, dict[str, Any]]:
    """Index rows of a generation by key."""
    return {row["key"]: row for row in index.read_rows(site.store, target=of[0], profile=of[1]).to_pylist()}


def bits(site: Site, of: tuple[bytes, bytes]) -> dict[bytes, tuple[str, bytes, bytes]]:
    """Scale mode and checksums of a generation's chunks by key."""
    return {key: (row["fp8_scale"], row["layer_checksums"], row["chain_digest"]) for key, row in rows(site, of).items()}


@pytest.mark.parametrize("mode", ["tensor", "head"])
def test_new_weights_get_scales_of_their_own(tmp_path: Path, mode: str) -> None:
    site = Site(tmp_path, RECORDS, cache_dtype=CACHE, fp8_scale=mode)
    assert site.compress() == 0
    old, first, scales = pair(site), site.truth(A), prepare(site.options).job.scales
    assert site.recompress() == 0 and "unchanged" in site.said
    site.weights(5)
    assert site.recompress() == 0 and "readers of mymodel now follow" in site.said
    new, second = pair(site), site.truth(A)
    assert new[0] == site.fingerprint() != old[0] and prepare(site.options).job.scales not in (b"", scales)
    assert read_pointers(site.store).retired.keys() == {old}
    found, before = site.restored(A), site.restored(A, old[0].hex())
    assert (
        found.tokens == before.tokens == len(A) and found.cache_format == CACHE and found.generation.profile == new[1]
    )
    assert same(found.load(), second) and same(before.load(), first) and not same(first, second)
    assert len(rows(site, new)) == len(rows(site, old)) == 7 and not rows(site, new).keys() & rows(site, old).keys()
    assert {row["fp8_scale"] for row in rows(site, new).values()} == {mode}
    assert site.recompress() == 0 and "unchanged" in site.said and pair(site) == new
    # Nobody has to say which target is meant: the other one is not in use.
    assert site.recompress(model=None, codec_only=True, coder="constriction-ans24/0.5") == 0
    assert pair(site)[0] == new[0] and pair(site) != new and bits(site, pair(site)) == bits(site, new)
    assert same(site.restored(A).load(), second) and same(site.restored(A, old[0].hex()).load(), first)
    assert site.whole()


@pytest.mark.parametrize("mode", ["tensor", "head"])
def test_another_rung_and_coder_keep_the_bits(tmp_path: Path, mode: str) -> None:
    site = Site(tmp_path, RECORDS, cache_dtype=CACHE, fp8_scale=mode)
    assert site.compress() == 0
    first, truth = pair(site), site.truth(A)
    assert site.recompress(codec_only=True, predictor="fp8") == 0  # calibrated with the model's files
    second = pair(site)
    shutil.rmtree(site.model)
    assert site.recompress(model=None, codec_only=True, coder="constriction-ans24/0.5") == 0
    third = pair(site)
    assert len({first, second, third}) == 3 and len({target for target, _ in (first, second, third)}) == 1
    assert bits(site, first) == bits(site, second) == bits(site, third) and len(bits(site, first)) == 7
    assert read_pointers(site.store).retired.keys() == {first, second}
    found = site.restored(A)
    assert found.generation.profile == third[1] and found.tokens == len(A) and same(found.load(), truth)
    assert site.recompress(model=None, codec_only=True) == 0 and "unchanged" in site.said
    assert site.recompress(model=None, codec_only=True, predictor="int8", coder="rans24x64-1") == 0
    assert pair(site) == first and same(site.restored(A).load(), truth) and site.whole()


def test_another_rung_leaves_caches_with_other_scales_alone(tmp_path: Path) -> None:
    """They are other caches of the same target: under these scales no reader would ever ask for their keys."""
    site = Site(tmp_path, RECORDS[:1], cache_dtype=CACHE, fp8_scale="tensor")
    assert site.compress() == 0
    by_tensor, truth = pair(site), site.truth(A)
    options_of(site.model, tmp_path, RECORDS[1:2])
    site.options = replace(site.options, fp8_scale="head")
    assert site.compress() == 0
    found, other = site.restored(B), site.truth(B)
    by_head = found.generation.target, found.generation.profile
    assert by_head != by_tensor == pair(site) and same(found.load(), other)
    assert site.recompress(codec_only=True, predictor="fp8") == 0 and "1 generations" in site.said
    new = pair(site)
    assert bits(site, new) == bits(site, by_tensor) and read_pointers(site.store).retired.keys() == {by_tensor}
    assert same(site.restored(A).load(), truth) and site.restored(A).generation.profile == new[1]
    found = site.restored(B)
    assert found.tokens == len(B) and found.generation.profile == by_head[1] and same(found.load(), other)
    assert site.recompress(codec_only=True, predictor="fp8") == 0 and "unchanged" in site.said
    make_old(site.store)
    collect(site.store, 3600.0, lambda text: None)
    assert same(site.restored(B).load(), other) and same(site.restored(A).load(), truth) and site.whole()
    # Computed anew, all of them get the scales that are asked for.
    assert site.recompress(fp8_scale="head", predictor="int8") == 0
    assert pair(site) == by_head and read_pointers(site.store).retired.keys() == {by_tensor, new}
    assert same(site.restored(A).load(), site.truth(A)) and same(site.restored(B).load(), other) and site.whole()


def test_what_no_stored_cache_can_become_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, RECORDS[:1])
    assert site.compress() == 0
    before = files(site.store)
    for changes, words in (
        ({"codec_only": True, "cache_dtype": CACHE}, "--cache-dtype fp8_e4m3 does not go with --codec-only"),
        ({"codec_only": True, "fp8_scale": "head"}, "--fp8-scale does not go with --codec-only"),
        ({"fp8_scale": "head"}, "--fp8-scale does not go with --cache-dtype bf16"),
    ):
        with pytest.raises(UserError, match=words):
            site.recompress(**changes)
    assert files(site.store) == before
