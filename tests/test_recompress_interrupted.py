"""Recompression that dies at a write, and readers meanwhile; then it is run again. In one process, with the stages' own bodies."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pipeline
from pipeline import recompress as module
from pipeline.audit import audit
from pipeline.collect import collect
from pipeline.current import point_first, read_pointers
from pipeline.deep import decode_store, here
from pipeline.model_source import resolve_model
from pipeline.recompress import RecompressOptions, recompress
from pipeline.run import Consoles
from pipeline.store import Store
from tests.conftest import write_tiny_llama, write_tokenizer
from tests.made_store import RECORDS, Made, make, make_old, options_of, without_ray
from tests.stored import same

pytestmark = pytest.mark.slow

PROMPTS = [record["token_ids"] for record in RECORDS]


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Site:
    """A store of the first weights, and a model's folder that holds the second ones since."""

    made: Made
    model: Path
    truth: dict[bytes, Any]

    def run(self, store: Path, **options: Any) -> int:
        console = Console(file=io.StringIO())
        return recompress(RecompressOptions(str(store), **options), Consoles(console, console))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    model = write_tiny_llama(folder / "mymodel")
    write_tokenizer(model)
    made = make(options_of(model, folder))
    point_first(made.store, "mymodel", "bf16", (made.job.target, made.job.profile))
    truth = {made.job.target: caches(made.store, made.job.target.hex())}
    write_tiny_llama(model, seed=5)
    other = tmp_path_factory.mktemp("other")
    new = make(options_of(model, other))
    truth[new.job.target] = caches(new.store, new.job.target.hex())
    return Site(made, model, truth)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


def caches(store: Store, model: str) -> list[Any]:
    reader = pipeline.Restorer(store, model)
    found = [reader.restore(ids) for ids in PROMPTS]
    assert len({restored.generation for restored in found}) == 1, "never a mixture"
    assert [restored.tokens for restored in found] == [len(ids) for ids in PROMPTS]
    return [restored.load() for restored in found]


def check_readers(store: Store, truth: dict[bytes, Any]) -> bytes:
    """Readers who ask for the name get all of one generation; whose."""
    reader = pipeline.Restorer(store, "mymodel")
    assert all(same(a, b) for a, b in zip(caches(store, "mymodel"), truth[reader.target], strict=True))
    return reader.target


def dies_at(monkeypatch: pytest.MonkeyPatch, kind: str, number: int, after: bool) -> list[str]:
    """Let the process die at its `number`-th write of a kind, before or after it; paths that were written."""
    put, written = Store.put_new, list[str]()

    def put_new(store: Store, path: str, data: bytes) -> bool:
        mine = [p for p in written if p.startswith(kind)]
        last = path.startswith(kind) and len(mine) == number
        if last and not after:
            raise Killed
        done = put(store, path, data)
        written.append(path)
        if last:
            raise Killed
        return done

    monkeypatch.setattr(Store, "put_new", put_new)
    return written


def whole(store: Store, chunks: int) -> None:
    seen = audit(store, grace=0.0, selects=lambda key: True)
    decode_store(seen, here(store, "cpu"))
    assert seen.faults == [] and seen.decoded == seen.rows == seen.blobs == chunks


POINTS = [
    ("profiles/by-config/", 0, False), ("current/", 0, True), ("blobs/", 3, True), ("index/", 1, True), ("current/", 1, False),
    ("current/", 1, True), ("runs/", 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "number", "after"), POINTS)
def test_new_weights(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, after: bool
) -> None:
    old = site.made.job.target
    store = site.made.copy(tmp_path).store
    with monkeypatch.context() as patch, pytest.raises(Killed):
        written = dies_at(patch, kind, number, after)
        site.run(tmp_path / "store", model=str(site.model))
    moved = kind == "runs/" or (kind, number, after) == ("current/", 1, True)
    assert (check_readers(store, site.truth) != old) == moved, written
    assert site.run(tmp_path / "store", model=str(site.model)) == 0
    assert check_readers(store, site.truth) != old
    whole(store, 14)
    assert len([path for path in store.list("current")]) == 3
    assert site.run(tmp_path / "store", model=str(site.model)) == 0


@pytest.mark.parametrize(
    ("kind", "number", "after"), [("current/", 0, True), ("blobs/", 2, True), ("current/", 1, False)]
)
def test_another_coder(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, after: bool
) -> None:
    """From the store alone; every chunk that is there already is gone on from."""
    old = site.made.job
    store = site.made.copy(tmp_path).store
    asked: dict[str, Any] = {"codec_only": True, "coder": "constriction-ans24/0.5", "source": old.target.hex()[:12]}
    monkeypatch.setattr(module, "resolve_model", None)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies_at(patch, kind, number, after)
        site.run(tmp_path / "store", **asked)
    assert read_pointers(store).current("mymodel", "bf16").profile == old.profile  # type: ignore[union-attr]
    assert check_readers(store, site.truth) == old.target
    assert site.run(tmp_path / "store", **asked) == 0
    assert read_pointers(store).current("mymodel", "bf16").profile != old.profile  # type: ignore[union-attr]
    assert check_readers(store, site.truth) == old.target
    whole(store, 14)


def test_collecting_dies_between_objects_and_goes_on(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, old = site.made.copy(tmp_path).store, site.made.job.target.hex()
    assert site.run(tmp_path / "store", model=str(site.model)) == 0
    make_old(store)
    delete, gone = Store.delete, list[str]()
    for limit in (1, 2, 4):
        with monkeypatch.context() as patch:

            def cut(self: Store, path: str, limit: int = limit) -> None:
                if path.startswith(("index/", "blobs/", "prompts/")):
                    if len(gone) >= limit:
                        raise Killed
                    gone.append(path)
                delete(self, path)

            patch.setattr(Store, "delete", cut)
            with pytest.raises(Killed):
                collect(store, 3600.0, lambda text: None)
        shutil.rmtree(tmp_path / "store" / "locks", ignore_errors=True)
        check_readers(store, site.truth)
    collect(store, 3600.0, lambda text: None)
    assert not [path for path in store.list() if old in path and not path.startswith("runs/")]
    whole(store, 7)


def test_what_was_begun_and_left_is_collected(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = site.made.copy(tmp_path).store
    new = resolve_model(site.model).fingerprint("bf16").hex()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies_at(patch, "index/", 0, True)
        site.run(tmp_path / "store", model=str(site.model))
    collect(store, 3600.0, lambda text: None)
    assert [path for path in store.list("blobs") if new in path]
    make_old(store)
    collect(store, 3600.0, lambda text: None)
    assert not [
        path for path in store.list() if new in path and not path.startswith(("runs/", "current/", "profiles/"))
    ]
    check_readers(store, site.truth)
    assert site.run(tmp_path / "store", model=str(site.model)) == 0
    whole(store, 14)
