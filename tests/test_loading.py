"""Loads into an engine's pages while blobs arrive: what is decoded when, and what is reported where a chunk fails."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from codec.errors import StorageError
from pipeline.engines.loader import Loader, PagedCache
from pipeline.engines.lookup import Load, Save
from pipeline.engines.pages import PageLayout
from pipeline.restoration.arriving import Arriving
from pipeline.restoration.restorer import Workshop
from pipeline.store import Store
from tests.stored import CHUNK, Kept, same
from tests.test_engines import BLOCK, PROMPT, load_of, paged
from tests.test_restoration import flip, forge

CHUNKS = 4  # of the prompt


@pytest.fixture(scope="module", params=["linear", "fp8"])
def stored(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Kept:
    """A rung that needs no chunk before one, and a rung that remembers them."""
    found = Kept(tiny_model, tmp_path_factory.mktemp("loading") / "store", kind=request.param)
    found.put({"prompt": PROMPT})
    return found


@pytest.fixture
def kept(stored: Kept, tmp_path: Path) -> Kept:
    """A copy that may be spoilt."""
    shutil.copytree(stored.store.uri.removeprefix("file://"), tmp_path / "store")
    other = object.__new__(Kept)
    other.__dict__.update(stored.__dict__)
    other.store = Store.open(str(tmp_path / "store"))
    return other


def loaded(kept: Kept, load: Load) -> tuple[PagedCache, set[int]]:
    """The pages after a load has ended, and the blocks that it reported as failed."""
    cache = paged(kept)
    loader = Loader(Workshop(kept.store), cache)
    loader.load(load)
    assert loader.done(60) == {load.request}
    loader.close()
    return cache, loader.failed()


def holds(kept: Kept, cache: PagedCache, load: Load, end: int) -> bool:
    """Whether the pages hold the stored bits of the tokens load.first … end - 1."""
    taken = cache.take(Save(load.ids[:end], load.blocks)).layers
    parts = [
        [(k[:, load.first : end], v[:, load.first : end]) for k, v in pairs] for pairs in (taken, kept.truth(PROMPT))
    ]
    return same(*parts)


def come_in(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """Let the blobs be taken so many at a time."""
    left = list(sizes)

    def take(self: Arriving) -> Iterator[bytes | None]:
        for _ in range(left.pop(0)):
            yield self._coming.popleft().result()

    monkeypatch.setattr(Arriving, "take", take)


@pytest.mark.parametrize("first", [0, 5 * BLOCK])
def test_pages_are_filled_before_the_last_blob_has_come(
    kept: Kept, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, real_get, real_put = threading.Event(), Store.get, PageLayout.put
    late = kept.blob(PROMPT, CHUNKS - 1).name

    def get(self: Store, path: str, **given: Any) -> bytes:
        if path.endswith(late):
            assert filled.wait(60), "nothing was decoded while a blob was on its way"
        return real_get(self, path, **given)

    def put(self: PageLayout, *given: Any) -> None:
        real_put(self, *given)
        filled.set()

    monkeypatch.setattr(Store, "get", get)
    monkeypatch.setattr(PageLayout, "put", put)
    load = load_of(kept, first)
    cache, failed = loaded(kept, load)
    assert not failed and holds(kept, cache, load, load.end)


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("damage", ["forged", "corrupt", "missing", "unreadable"])
def test_a_load_ends_before_the_chunk_that_fails_however_blobs_come(
    kept: Kept, sizes: tuple[int, ...], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, load, real = kept.blob(PROMPT, 2), load_of(kept), Store.get

    def get(self: Store, name: str, **given: Any) -> bytes:
        if name.endswith(path.name):
            raise StorageError(f"{name} cannot be read")
        return real(self, name, **given)

    spoil: dict[str, Callable[[], object]] = {
        "forged": lambda: forge(path), "corrupt": lambda: flip(path, -60), "missing": path.unlink,
        "unreadable": lambda: monkeypatch.setattr(Store, "get", get),
    }  # fmt: skip
    spoil[damage]()
    come_in(monkeypatch, sizes)
    cache, failed = loaded(kept, load)
    assert failed == set(load.blocks[2 * CHUNK // BLOCK : load.end // BLOCK])
    assert holds(kept, cache, load, 2 * CHUNK)


def test_a_chunk_that_fails_before_what_is_asked_for_fails_all_of_it(kept: Kept) -> None:
    load = load_of(kept, 5 * BLOCK)
    forge(kept.blob(PROMPT, 0))
    assert loaded(kept, load)[1] == set(load.blocks[5 : load.end // BLOCK])


def test_an_engine_that_fails_meanwhile_gets_none_of_the_blocks(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[int] = []

    def put(self: PageLayout, *given: Any) -> None:
        puts.append(given[2])
        if given[2] >= CHUNK:
            raise RuntimeError("no such page")

    come_in(monkeypatch, (1, 3))
    monkeypatch.setattr(PageLayout, "put", put)
    load = load_of(kept)
    assert loaded(kept, load)[1] == set(load.blocks[: load.end // BLOCK])
    assert puts == [0, 0, 0, CHUNK], "a whole chunk was written before"
