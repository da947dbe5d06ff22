"""Restored caches as safetensors: names, ranges, streams cut short; several prompts in one batch; names of files."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import codec
import pipeline
from codec.errors import ChunkFailed, DataError, StorageError, UserError
from pipeline.restoration.batch import BatchRestorer, Outcome, Request
from pipeline.restoration.catalogue import Catalogue, token_array
from pipeline.restoration.earlier import EarlierFiles
from pipeline.restoration.files import AtomicFile, file_name, layout, stream
from pipeline.restoration.pool import make_batches
from pipeline.restoration.restorer import Workshop
from tests.stored import CHUNK, Kept, same, tokens_of
from tests.test_restoration import forge

SHARED = tokens_of(1, 2 * CHUNK)
PROMPTS = {
    "a": SHARED + tokens_of(2, CHUNK + 4),
    "b": SHARED + tokens_of(3, 9),
    "c": SHARED,
    "d": tokens_of(4, 40),
}


@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    found = Kept(tiny_model, tmp_path_factory.mktemp("kept"))
    found.put(PROMPTS)
    return found


@pytest.fixture
def own(tiny_model: Path, tmp_path: Path) -> Kept:
    """A store that may be spoilt."""
    found = Kept(tiny_model, tmp_path / "store")
    found.put(PROMPTS)
    return found


def pairs_of(path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensors = safetensors.torch.load_file(path)
    numbers = sorted({int(name.split(".")[1]) for name in tensors if name != "scales"})
    return [(tensors[f"layers.{n}.key"], tensors[f"layers.{n}.value"]) for n in numbers]


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
        return found


def requests(kept: Kept, folder: Path, prompts: dict[str, list[int]] = PROMPTS) -> list[Request]:
    catalogue = Catalogue(kept.store, kept.job.target)
    out = []
    for name, ids in prompts.items():
        matches, notes = catalogue.find(token_array(ids))
        out.append(Request(name, token_array(ids), tuple(matches), str(folder / file_name(name)), tuple(notes)))
    return out


# ---------------------------------------------------------------- one prompt
def test_a_stream_is_a_safetensors_file_of_the_size_that_was_said(kept: Kept, tmp_path: Path) -> None:
    ids = PROMPTS["a"]
    found = pipeline.restore(kept.store, kept.job.target.hex(), ids)
    plan = layout(found, {"id": "a"})
    data = b"".join(stream(found, plan, found.layers()))
    assert len(data) == plan.size
    (tmp_path / "a.safetensors").write_bytes(data)
    assert same(pairs_of(tmp_path / "a.safetensors"), kept.truth(ids))
    said = metadata(tmp_path / "a.safetensors")
    assert (said["tokens"], said["format"], said["layers"], said["heads"]) == (str(len(ids)), "bf16", "0:3", "0:2")
    assert said["digest"] == found.digest.hex() and said["id"] == "a" and said["target"] == kept.job.target.hex()


def test_of_an_fp8_cache_the_stored_values_and_their_scales(tiny_model: Path, tmp_path: Path) -> None:
    kept = Kept(tiny_model, tmp_path / "store", kind="linear", cache="fp8_e4m3", mode="head")
    ids = PROMPTS["b"]
    kept.put({"b": ids})
    found = pipeline.restore(kept.store, kept.job.target.hex(), ids, layers=(1, 3), heads=(1, 2))
    plan = layout(found)
    (tmp_path / "b.safetensors").write_bytes(b"".join(stream(found, plan, found.layers())))
    tensors = safetensors.torch.load_file(tmp_path / "b.safetensors")
    truth = [(k[1:2], v[1:2]) for k, v in kept.truth(ids)[1:]]
    assert same([(tensors[f"layers.{n}.key"], tensors[f"layers.{n}.value"]) for n in (1, 2)], truth)
    scales = kept.target.scales
    assert scales is not None and torch.equal(tensors["scales"], torch.from_numpy(scales.values[1:3, :, 1:2]))
    assert metadata(tmp_path / "b.safetensors")["scale_mode"] == "head"


def test_what_is_cut_short_is_no_safetensors_file(own: Kept) -> None:
    forge(own.blob(PROMPTS["a"], 1))
    found = pipeline.restore(own.store, own.job.target.hex(), PROMPTS["a"])
    plan, got = layout(found), []
    with pytest.raises(ChunkFailed):
        got.extend(stream(found, plan, found.layers()))
    assert len(got) in (3, 5), "the header and a layer or two were sent"
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid"):
        safetensors.torch.load(b"".join(got))


# ---------------------------------------------------------------- several prompts
def test_prompts_of_one_batch_share_what_they_begin_with(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    run = type(kept.predictor).run

    def counted(
        self: codec.Predictor, states: list[codec.PredictorState], ids: list[torch.Tensor], **more: Any
    ) -> object:
        rows.append(sum(len(t) for t in ids))
        return run(self, states, ids, **more)

    found = BatchRestorer(Workshop(kept.store))
    found.run(requests(kept, tmp_path, {"d": PROMPTS["d"]}))  # loads the predictor, whose proof runs it too
    monkeypatch.setattr(type(kept.predictor), "run", counted)
    outcomes = found.run(requests(kept, tmp_path))
    assert rows == [len(SHARED) + (CHUNK + 4) + 9 + 40]
    assert [(o.id, o.asked, o.tokens, o.error) for o in outcomes] == [
        (n, len(i), len(i), "") for n, i in PROMPTS.items()
    ]
    for name, ids in PROMPTS.items():
        path = tmp_path / f"{name}.safetensors"
        assert (
            same(pairs_of(path), kept.truth(ids)) and path.stat().st_size == outcomes[list(PROMPTS).index(name)].bytes
        )


def test_a_batch_of_ranges(kept: Kept, tmp_path: Path) -> None:
    BatchRestorer(Workshop(kept.store), layers=(1, 2), heads=(0, 1)).run(requests(kept, tmp_path))
    for name, ids in PROMPTS.items():
        key, value = kept.truth(ids)[1]
        assert same(pairs_of(tmp_path / f"{name}.safetensors"), [(key[:1], value[:1])])


@pytest.mark.parametrize(
    ("prompt", "chunk", "left"), [("a", 1, (32, 32, 32, 40)), ("a", 2, (64, 73, 64, 40)), ("d", 0, (100, 73, 64, 0))]
)
def test_a_chunk_that_fails_shortens_those_that_hold_it_and_no_other(
    own: Kept, tmp_path: Path, prompt: str, chunk: int, left: tuple[int, ...]
) -> None:
    forge(own.blob(PROMPTS[prompt], chunk))
    outcomes: list[Outcome] = BatchRestorer(Workshop(own.store)).run(requests(own, tmp_path))
    assert tuple(o.tokens for o in outcomes) == left
    for (name, ids), outcome in zip(PROMPTS.items(), outcomes, strict=True):
        assert outcome.damaged == (outcome.tokens < len(ids)) == any(".kv: " in n for n in outcome.notes)
        path = tmp_path / f"{name}.safetensors"
        if outcome.tokens:
            assert same(pairs_of(path), own.truth(ids[: outcome.tokens]))
        else:
            assert not path.exists() and outcome.bytes == 0
    assert not list(tmp_path.glob(".*")), "temporary files are gone"


def test_batches_hold_at_most_so_many_tokens_and_keep_like_prompts_together(kept: Kept, tmp_path: Path) -> None:
    asked = requests(kept, tmp_path, {n: PROMPTS[n] for n in ("a", "d", "b", "c")})
    assert [[r.id for r in b] for b in make_batches(asked, 1, 100)] and len(list(make_batches(asked, 1, 100))) == 4
    batches = [{r.id for r in batch} for batch in make_batches(asked, 250, 100)]
    assert {"a", "b", "c"} in batches and {"d"} in batches
    # Only a window of requests is taken from the source ahead of the first batch.
    taken: list[str] = []

    def source() -> object:
        for request in asked:
            taken.append(request.id)
            yield request

    next(make_batches(source(), 1, 2))  # type: ignore[arg-type]
    assert taken == ["a", "d"]
    assert list(islice(make_batches([], 10, 10), 1)) == []


# ---------------------------------------------------------------- files of an earlier run
def restored(kept: Kept, folder: Path, ids: list[int], layers: tuple[int, int] | None = None) -> Path:
    """The file of a prompt, whose longest stored prefix may be a part of it."""
    BatchRestorer(Workshop(kept.store), layers=layers).run(requests(kept, folder, {"x": ids}))
    return folder / "x.safetensors"


def is_whole(kept: Kept, path: Path, ids: list[int], layers: tuple[int, int] | None = None) -> bool:
    catalogue = Catalogue(kept.store, kept.job.target)
    return EarlierFiles(catalogue, layers).is_whole(path, token_array(ids), b"", *catalogue.find(token_array(ids)))


def test_a_file_stays_as_long_as_it_holds_all_that_is_stored(own: Kept, tmp_path: Path) -> None:
    longer = PROMPTS["c"] + tokens_of(8, CHUNK)
    path = restored(own, tmp_path, longer)
    assert metadata(path)["tokens"] == str(len(SHARED)) and is_whole(own, path, longer)
    own.put({"longer": longer})
    assert not is_whole(own, path, longer) and is_whole(own, path, PROMPTS["c"])
    assert is_whole(own, restored(own, tmp_path, longer), longer)


def test_a_file_that_ends_amid_a_chunk_is_completed_when_more_is_stored(own: Kept, tmp_path: Path) -> None:
    short = PROMPTS["c"] + tokens_of(8, CHUNK // 2)
    longer = short + tokens_of(9, CHUNK)
    own.put({"short": short})
    path = restored(own, tmp_path, short)
    assert metadata(path)["tokens"] == str(len(short)) and len(short) % CHUNK
    assert is_whole(own, path, short)
    own.put({"longer": longer})
    assert not is_whole(own, path, longer) and is_whole(own, path, short)
    assert is_whole(own, restored(own, tmp_path, longer), longer)


def test_a_file_of_a_prompt_that_is_gone_is_not_called_another_ones(kept: Kept, tmp_path: Path) -> None:
    path, ids = restored(kept, tmp_path, PROMPTS["a"]), token_array(PROMPTS["a"])
    earlier = EarlierFiles(Catalogue(kept.store, kept.job.target))
    with pytest.raises(UserError, match=r"holds nothing of the prompt.*--overwrite"):
        earlier.is_whole(path, ids, b"", [])
    with pytest.raises(DataError, match="the part is damaged"):
        earlier.is_whole(path, ids, b"", [], ["the part is damaged"])


def test_a_file_of_something_else_is_never_taken_for_it(kept: Kept, tmp_path: Path) -> None:
    path = restored(kept, tmp_path, PROMPTS["a"])
    for ids in (PROMPTS["b"], PROMPTS["c"], PROMPTS["d"], tokens_of(99, 40)):
        with pytest.raises(UserError, match=r"(another cache than|holds nothing of) .*--overwrite"):
            is_whole(kept, path, ids)
    with pytest.raises(UserError, match="holds layers 0:3, and asked for are 1:3"):
        is_whole(kept, path, PROMPTS["a"], (1, 3))
    part = restored(kept, tmp_path, PROMPTS["a"], (1, 3))
    assert is_whole(kept, part, PROMPTS["a"], (1, 3))
    with pytest.raises(UserError, match="holds layers 1:3, and asked for are 0:3"):
        is_whole(kept, part, PROMPTS["a"])


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_file_that_was_cut_short_is_said(kept: Kept, tmp_path: Path, keep: int) -> None:
    path = restored(kept, tmp_path, PROMPTS["d"])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="not all of it"):
        is_whole(kept, path, PROMPTS["d"])


# ---------------------------------------------------------------- files
@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("plain-1", "plain-1"), ("a/b", "a%2Fb"), ("..", "%2E."), (".hidden", "%2Ehidden"), ("a\x00\n", "a%00%0A"),
        ("with space", "with space"), ("50%", "50%25"), ("ä", "%C3%A4"), ("a\\b:c", "a%5Cb%3Ac"),
    ],
)  # fmt: skip
def test_ids_that_are_no_file_names_are_encoded(identity: str, name: str) -> None:
    assert file_name(identity) == f"{name}.safetensors"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400))
def test_any_id_is_one_plain_name(identity: str) -> None:
    name = file_name(identity)
    assert len(os.fsencode(name)) < 255 - 38 and "/" not in name and "\x00" not in name and not name.startswith(".")


def test_long_ids_stay_apart() -> None:
    names = {file_name("x" * 500 + str(n)) for n in range(3)}
    assert len(names) == 3


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), AtomicFile(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]
    with AtomicFile(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x.safetensors"]
    with pytest.raises(StorageError, match="none"):
        AtomicFile(tmp_path / "none" / "x")


def test_what_cannot_be_written_is_said(kept: Kept, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        BatchRestorer(Workshop(kept.store)).run(requests(kept, tmp_path / "none"))
