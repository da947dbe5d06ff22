"""Restoring: the longest stored prefix, its bits, its ranges, and what becomes of damage."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import codec
import pipeline
from codec import blob as blobs
from codec.errors import ChunkFailed, DataError, UserError
from codec.predictor import memory, rope
from pipeline.restoration.catalogue import ROPE_REGIMES, Catalogue, token_array
from pipeline.restoration.restorer import Restorer
from pipeline.restoration.span import parse_range
from pipeline.store import Store
from tests.stored import CHUNK, Kept, same, tokens_of

PROMPT = tokens_of(1, 3 * CHUNK + 9)
OTHER = PROMPT[: 2 * CHUNK] + tokens_of(2, 20)


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    found = Kept(tiny_model, tmp_path_factory.mktemp("kept") / "store")
    found.put({"prompt": PROMPT, "other": OTHER})
    return found


@pytest.fixture
def copied(kept: Kept, tmp_path: Path) -> Callable[[], Kept]:
    """A copy of the store that may be spoilt."""

    def copy() -> Kept:
        shutil.copytree(kept.store.uri.removeprefix("file://"), tmp_path / "store")
        other = object.__new__(Kept)
        other.__dict__.update(kept.__dict__)
        other.store = Store.open(str(tmp_path / "store"))
        return other

    return copy


def hex_of(kept: Kept) -> str:
    return kept.job.target.hex()


# ---------------------------------------------------------------- what is found
def test_a_stored_prompt_comes_back_bit_for_bit(kept: Kept) -> None:
    found = pipeline.restore(kept.store, kept.job.model.path, PROMPT)
    assert found.tokens == found.asked == len(PROMPT) and found.notes == []
    assert same(found.load(), kept.truth(PROMPT))
    numbers = [number for number, _ in found.layers()]
    assert numbers == list(range(len(kept.truth(PROMPT))))


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        (PROMPT + tokens_of(3, 40), len(PROMPT)),  # also the chunk that is not full
        (PROMPT[: 2 * CHUNK] + tokens_of(4, 40), 2 * CHUNK),
        (PROMPT[: 2 * CHUNK + 5], 2 * CHUNK),
        (PROMPT[: CHUNK - 1], 0),
        ([*PROMPT[:CHUNK], (PROMPT[CHUNK] + 1) % 384, *PROMPT[CHUNK + 1 :]], CHUNK),
        (OTHER + PROMPT, len(OTHER)),
        (tokens_of(5, 100), 0),
        ([], 0),
    ],
)
def test_the_longest_stored_prefix_is_found(kept: Kept, ids: list[int], tokens: int) -> None:
    found = pipeline.restore(kept.store, hex_of(kept), ids)
    assert (found.tokens, found.asked) == (tokens, len(ids))
    assert bool(found.notes) == (tokens < len(ids) or not ids)
    assert same(found.load(), kept.truth(ids[:tokens])) if tokens else found.load() == []


def test_neither_weights_nor_name_of_the_model_are_needed(kept: Kept) -> None:
    name = kept.job.model.name
    for model in (hex_of(kept), hex_of(kept).upper(), name, Path(kept.job.model.path), kept.job.model.path):
        found = pipeline.restore(kept.store.uri, model, torch.tensor([PROMPT]))
        assert found.tokens == len(PROMPT) and found.generation.target == kept.job.target


def test_chunks_come_back_one_by_one(kept: Kept) -> None:
    found = pipeline.restore(kept.store, hex_of(kept), np.array(PROMPT))
    chunks = list(found.chunks())
    assert [(c.first_token, c.tokens) for c in chunks] == [(0, 32), (32, 32), (64, 32), (96, 9)]
    truth = kept.truth(PROMPT)
    for chunk in chunks:
        part = slice(chunk.first_token, chunk.first_token + chunk.tokens)
        assert same(chunk.layers, [(k[:, part], v[:, part]) for k, v in truth])
    last = list(found.chunks(3))
    assert len(last) == 1 and same(last[0].layers, chunks[3].layers)


def test_what_windows_left_behind_is_let_go_while_chunks_are_decoded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PIECE", 16)
    kept, prompt = Kept(tiny_model, tmp_path, kind="int8", window=16), tokens_of(31, 5 * CHUNK + 7)
    kept.put({"long": prompt})
    gaps: list[int] = []
    real = memory.Memory.seen

    def seen(self: memory.Memory, near: int = 0) -> memory.Seen:
        gaps.append(self.gap)
        return real(self, near)

    monkeypatch.setattr(memory.Memory, "seen", seen)
    truth, found = kept.truth(prompt), pipeline.restore(kept.store, hex_of(kept), prompt)
    assert same(found.load(), truth) and not any(gaps)
    for chunk in found.chunks():
        part = slice(chunk.first_token, chunk.first_token + chunk.tokens)
        assert same(chunk.layers, [(k[:, part], v[:, part]) for k, v in truth])
    assert max(gaps) > 2 * CHUNK
    gaps.clear()
    assert same(pipeline.restore(kept.store, hex_of(kept), prompt, decode=True).load(), truth)


@pytest.mark.parametrize(("kind", "cache"), [("static", "bf16"), ("linear", "bf16"), ("linear", "fp8_e4m3")])
def test_rungs_without_a_model_decode_any_chunk_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cache: str
) -> None:
    kept = Kept(tiny_model, tmp_path, kind=kind, cache=cache)
    kept.put({"prompt": PROMPT})
    found = pipeline.restore(kept.store, hex_of(kept), PROMPT)
    passes: list[int] = []
    run = codec.ModelFree.run

    def counted(
        self: codec.ModelFree, states: list[codec.PredictorState], ids: list[torch.Tensor], **more: Any
    ) -> object:
        passes.append(states[0].length)
        return run(self, states, ids, **more)

    monkeypatch.setattr(codec.ModelFree, "run", counted)
    (chunk,) = found.chunks(2, 3)
    assert passes == [2 * CHUNK]
    assert same(chunk.layers, [(k[:, 64:96], v[:, 64:96]) for k, v in kept.truth(PROMPT)])
    assert same(found.load(), kept.truth(PROMPT))


@pytest.mark.parametrize(
    ("kind", "loop", "cache", "mode"),
    [
        ("fp8", "open", "bf16", ""), ("int8", "closed", "fp16", ""), ("int8-a16", "closed", "fp32", ""),
        ("int4", "closed", "bf16", ""), ("fp8", "closed", "fp8_e4m3", "head"), ("int8", "open", "fp8_e5m2", "tensor"),
    ],
)  # fmt: skip
def test_other_rungs_and_formats(tiny_model: Path, tmp_path: Path, kind: str, loop: str, cache: str, mode: str) -> None:
    kept = Kept(tiny_model, tmp_path, kind=kind, loop=loop, cache=cache, mode=mode)
    kept.put({"prompt": PROMPT})
    found = pipeline.restore(kept.store, kept.job.model.path, PROMPT)
    assert found.cache_format == cache and (found.scales is None) == (not mode)
    assert same(found.load(), kept.truth(PROMPT))


# ---------------------------------------------------------------- ranges
def test_ranges_of_layers_and_heads(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = kept.truth(PROMPT)
    found = pipeline.restore(kept.store, hex_of(kept), PROMPT, layers=(1, 2), heads=(1, 2))
    guessed: list[int] = []
    run = type(kept.predictor).run

    def watched(*arguments: Any, **more: Any) -> object:
        passing = run(*arguments, **more)
        guess = passing.guess
        monkeypatch.setattr(passing, "guess", lambda layer: guessed.append(layer) or guess(layer), raising=False)
        return passing

    monkeypatch.setattr(type(kept.predictor), "run", watched)
    got = list(found.layers())
    assert [number for number, _ in got] == [1] and guessed == [0, 1], "nothing above the last layer is computed"
    assert same([pair for _, pair in got], [(truth[1][0][1:2], truth[1][1][1:2])])
    chunk = next(found.chunks())
    assert same(chunk.layers, [(truth[1][0][1:2, :CHUNK], truth[1][1][1:2, :CHUNK])])


@pytest.mark.parametrize(
    "ranges", [{"layers": (0, 4)}, {"layers": (2, 2)}, {"heads": (1, 3)}, {"heads": (-1, 1)}, {"layers": (2, 1)}]
)
def test_ranges_that_the_cache_does_not_have(kept: Kept, ranges: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(UserError, match="not in a cache that has"):
        pipeline.restore(kept.store, hex_of(kept), PROMPT, **ranges)


def test_decoding_while_blobs_arrive_gives_the_same_bits(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    begun, real_get, real_decode = threading.Event(), kept.store.get, codec.decode_prefixes
    late = kept.blob(PROMPT, 2).name

    def get(path: str, **given: int) -> bytes:
        if path.endswith(late):
            assert begun.wait(60)  # it comes only after decoding has begun
        return real_get(path, **given)

    def decode(predictor: Any, profile: Any, tasks: list[codec.PrefixTask], **more: Any) -> Iterator[Any]:
        decoded.append(sum(len(task.blobs) for task in tasks))
        begun.set()
        return real_decode(predictor, profile, tasks, **more)

    monkeypatch.setattr(kept.store, "get", get)
    monkeypatch.setattr(codec, "decode_prefixes", decode)
    restorer = Restorer(kept.store, hex_of(kept))
    found = restorer.restore([*PROMPT, 5], decode=True)
    assert sum(decoded) == 4 and 2 <= len(decoded) <= 3  # not the first alone if the second was there, too
    assert same(found.load(), kept.truth(PROMPT)) and "no more of the prompt" in found.notes[0]
    assert [n for n, _ in found.layers()] == [0, 1, 2] and same([p for _, p in found.layers()], kept.truth(PROMPT))
    assert sum(decoded) == 4  # nothing was decoded again
    part = restorer.restore(PROMPT, layers=(1, 2), heads=(1, 2), decode=True)
    assert same(part.load(), [(k[1:2], v[1:2]) for k, v in kept.truth(PROMPT)[1:2]])
    assert restorer.restore(tokens_of(77, 50), decode=True).load() == []


@pytest.mark.parametrize("damage", ["forged", "corrupt", "missing"])
def test_damage_found_while_blobs_arrive_ends_the_prefix_before_it(copied: Callable[[], Kept], damage: str) -> None:
    kept = copied()
    path = kept.blob(PROMPT, 2)
    {"forged": lambda: forge(path), "corrupt": lambda: flip(path, -60), "missing": path.unlink}[damage]()
    found = pipeline.restore(kept.store, hex_of(kept), PROMPT, decode=True)
    assert same(found.load(), kept.truth(PROMPT[: 2 * CHUNK]))
    assert found.tokens == 2 * CHUNK and found.damaged and path.name in found.notes[-1]


def test_ranges_on_a_command_line() -> None:
    assert parse_range("--heads", None) is None and parse_range("--heads", "0:12") == (0, 12)
    for text in ("", "3", "3:", ":3", "3:3", "4:3", "-1:2", "1:2:3", "a:b", "0:9999999"):
        with pytest.raises(UserError, match="--heads"):
            parse_range("--heads", text)


# ---------------------------------------------------------------- damage
def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def other_chunk(kept: Kept) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(kept.blob(OTHER, 2).read_bytes())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: flip(p, 40), "header"),
        (lambda p: flip(p, -60), "checksum"),
        (cut, "cut or extended"),
        (lambda p: p.unlink(), "not in the store"),
        (lambda p: p.write_bytes(b""), "only 0 bytes"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "cut or extended"),
        ("swap", "prefix key"),
    ],
)
def test_the_prefix_ends_before_a_chunk_that_is_not_right(
    copied: Callable[[], Kept], damage: Callable[[Path], None] | str, words: str
) -> None:
    spoilt = copied()
    act = other_chunk(spoilt) if isinstance(damage, str) else damage
    act(spoilt.blob(PROMPT, 2))
    found = pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT)
    assert found.tokens == 2 * CHUNK
    assert any(words in note and ".kv" in note for note in found.notes), found.notes
    assert same(found.load(), spoilt.truth(PROMPT[: 2 * CHUNK]))


def test_a_child_of_other_bits_ends_the_prefix(copied: Callable[[], Kept]) -> None:
    """A blob that is right in itself, and follows another parent than the one in the store."""
    spoilt = copied()
    path = spoilt.blob(PROMPT, 2)
    header = codec.read_header(path.read_bytes())
    streams = blobs.streams(path.read_bytes(), header)
    path.write_bytes(blobs.pack(dataclasses.replace(header, parent_digest=bytes(16)), streams))
    found = pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT)
    assert found.tokens == 2 * CHUNK and "parent digest" in found.notes[-1]


def test_nothing_is_given_where_the_first_chunk_is_damaged(copied: Callable[[], Kept]) -> None:
    spoilt = copied()
    flip(spoilt.blob(PROMPT, 0), -60)
    found = pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT)
    assert found.tokens == 0 and found.load() == [] and list(found.layers()) == [] and list(found.chunks()) == []
    with pytest.raises(UserError, match="checksum"):
        found.prefix.task(spoilt.predictor.new_state())


def forge(path: Path) -> None:
    """Change a bitstream past its middle and mend the checksum of the blob: only the layers' own checksums can tell."""
    header = codec.read_header(path.read_bytes())
    (stream,) = blobs.streams(path.read_bytes(), header)
    at = len(stream) * 5 // 8
    path.write_bytes(blobs.pack(header, [stream[:at] + bytes([stream[at] ^ 0x55]) + stream[at + 1 :]]))


def test_a_chunk_that_decodes_wrongly_aborts_and_the_library_goes_on_with_less(copied: Callable[[], Kept]) -> None:
    spoilt = copied()
    forge(spoilt.blob(PROMPT, 2))
    found = pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT)
    assert found.tokens == len(PROMPT), "checksums of blobs are right, so it is seen only in decoding"
    got: list[int] = []
    with pytest.raises(ChunkFailed):
        for number, _ in found.layers():
            got.append(number)
    assert got in ([0], [0, 1]) and found.tokens == 2 * CHUNK
    assert same(found.load(), spoilt.truth(PROMPT[: 2 * CHUNK]))
    again = pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT)
    assert same(again.load(), spoilt.truth(PROMPT[: 2 * CHUNK])), "load retries by itself"
    assert "the prefix ends after 64 tokens" in again.notes[-1]
    chunks = pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT).chunks()
    assert [next(chunks).first_token for _ in range(2)] == [0, CHUNK]
    with pytest.raises(ChunkFailed):
        next(chunks)


def test_a_damaged_profile_is_said(copied: Callable[[], Kept]) -> None:
    spoilt = copied()
    root = Path(spoilt.store.uri.removeprefix("file://"))
    flip(root / "profiles" / spoilt.job.profile.hex(), -1)
    with pytest.raises(DataError, match="profile"):
        pipeline.restore(spoilt.store, hex_of(spoilt), PROMPT)


# ---------------------------------------------------------------- several generations, tenants, a store that grows
def test_of_several_generations_the_longest_intact_prefix_is_taken(
    kept: Kept, tiny_model: Path, copied: Callable[[], Kept]
) -> None:
    spoilt = copied()
    coarse = Kept(tiny_model, spoilt.store.uri, kind="static", chunk=CHUNK * 2)
    coarse.put({"short": PROMPT[: 2 * CHUNK + 2]})
    restorer = Restorer(spoilt.store, hex_of(spoilt))
    found = restorer.restore(PROMPT)
    assert found.tokens == len(PROMPT) and found.generation.profile == spoilt.job.profile
    flip(spoilt.blob(PROMPT, 1), -60)
    found = restorer.restore(PROMPT)
    assert found.tokens == 2 * CHUNK + 2 and found.generation.profile == coarse.job.profile
    assert same(found.load(), coarse.truth(PROMPT[: 2 * CHUNK + 2]))


def test_tenants_do_not_see_each_other(tiny_model: Path, tmp_path: Path) -> None:
    kept = Kept(tiny_model, tmp_path, kind="static", salt=b"one")
    kept.put({"prompt": PROMPT})
    assert pipeline.restore(kept.store, hex_of(kept), PROMPT, salt=b"one").tokens == len(PROMPT)
    assert pipeline.restore(kept.store, hex_of(kept), PROMPT, salt=b"two").tokens == 0
    assert pipeline.restore(kept.store, hex_of(kept), PROMPT).tokens == 0


def test_a_store_that_grows_is_seen_after_a_refresh(tiny_model: Path, tmp_path: Path) -> None:
    kept = Kept(tiny_model, tmp_path, kind="static")
    kept.put({"other": OTHER})
    restorer = Restorer(kept.store, hex_of(kept))
    assert len(restorer.catalogue) == 3 and not restorer.catalogue.refresh()
    kept.put({"prompt": PROMPT})
    assert restorer.restore(PROMPT).tokens == 2 * CHUNK
    assert restorer.catalogue.refresh()
    assert restorer.restore(PROMPT).tokens == len(PROMPT)


def test_formats_side_by_side_are_told_apart(tiny_model: Path, tmp_path: Path) -> None:
    plain, coarse = (Kept(tiny_model, tmp_path, kind="static", cache=cache) for cache in ("fp16", "fp8_e5m2"))
    plain.put({"prompt": PROMPT})
    coarse.put({"prompt": PROMPT})
    store, model = plain.store, plain.job.model
    for one in (plain, coarse):
        found = pipeline.restore(store, model.path, PROMPT, cache_dtype=one.job.cache_format)
        assert same(found.load(), one.truth(PROMPT))
        found = pipeline.restore(store, model.name, PROMPT, cache_dtype=one.job.cache_format)
        assert found.generation.target == one.job.target
    with pytest.raises(UserError, match="fp16 and fp8_e5m2"):
        pipeline.restore(store, model.path, PROMPT)
    with pytest.raises(UserError, match="2 targets"):
        pipeline.restore(store, model.name, PROMPT)


# ---------------------------------------------------------------- what cannot be
def test_requests_that_cannot_be_met(kept: Kept, tmp_path: Path, make_tiny_model: Callable[..., Path]) -> None:
    for model, words in (
        ("ab" * 32, "holds nothing"), ("nobody", "no name in the index"), (make_tiny_model(seed=7), "with these weights"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            pipeline.restore(kept.store, model, PROMPT)
    kept_as = f"caches of '{kept.job.model.name}' in bf16, not in fp16"
    with pytest.raises(UserError, match=kept_as):
        pipeline.restore(kept.store, kept.job.model.name, PROMPT, cache_dtype="fp16")
    with pytest.raises(UserError, match="no store"):
        pipeline.restore(str(tmp_path / "none"), hex_of(kept), PROMPT)
    with pytest.raises(UserError, match="dtype"):
        pipeline.restore(kept.store, hex_of(kept), PROMPT, cache_dtype="int3")
    for tokens in ([[1, 2], [3, 4]], [1.5], "text", [-1], [1 << 32], object()):
        with pytest.raises(UserError, match="token"):
            token_array(tokens)


def test_the_regimes_of_keys_are_those_of_the_codec() -> None:
    assert set(ROPE_REGIMES) == {"", *rope._BY_LENGTH}


def test_a_foreign_file_in_the_index_is_passed_over_and_a_bent_one_named(copied: Callable[[], Kept]) -> None:
    spoilt = copied()
    root = Path(spoilt.store.uri.removeprefix("file://")) / "index" / hex_of(spoilt)
    (root / "README").write_text("notes")
    Catalogue(spoilt.store, spoilt.job.target)
    flip(next(root.rglob("*.parquet")), -1)
    with pytest.raises(DataError, match="index part"):
        Catalogue(spoilt.store, spoilt.job.target)
