"""Looking after a store that real jobs write to: embedded Ray, and a real S3 server."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pipeline
from codec.checksums import digest
from codec.errors import StorageError
from jobs.gc import main as gc
from jobs.verify import main as verify
from pipeline import index, ray_runtime
from pipeline.current import read_pointers
from pipeline.options import Options
from pipeline.paths import parse_blob_path
from pipeline.quota import store_bytes
from pipeline.run import Consoles, run
from pipeline.store import Store
from tests.made_store import RECORDS, ShakenActor, make, options_of, overwrite
from tests.s3_server import BUCKET, s3_server
from tests.stored import same
from tests.test_recompress import Site

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server, and then Ray, whose workers inherit its environment."""
    before = dict(os.environ)
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        os.environ.update(environment)
        with ray_runtime.connected(2):
            yield
    for name in environment:
        os.environ.pop(name)
        if name in before:
            os.environ[name] = before[name]


def work(options: Options) -> tuple[int, str]:
    """(exit status, what was printed)."""
    text = io.StringIO()
    console = Console(file=text, width=300)
    return run(options, Consoles(console, console)), text.getvalue()


def test_a_store_on_s3_is_verified_repaired_collected_and_purged(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = replace(options_of(tiny_model, tmp_path), store=f"s3://{BUCKET}/looked-after", verify="none")
    assert work(options)[0] == 0
    store, arguments = Store(options.store), ["--store", options.store]
    blobs = list(store.list("blobs"))
    assert len(blobs) == 7 and list(store.list("running")) == []
    assert verify([*arguments, "--deep"]) == 0 and "7 read, 7 decoded" in capsys.readouterr().out
    good = store.get(blobs[3])
    store.delete(blobs[3])
    store.put_new(blobs[3], good[:-1])
    assert verify([*arguments, "--repair"]) == 1 and f"corrupt: {blobs[3]}: " in capsys.readouterr().out
    assert work(options)[0] == 0 and store.get(blobs[3]) == good
    assert verify([*arguments, "--deep"]) == 0
    bucket, _, key = f"{store._root}/blobs/x".partition("/")
    store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    assert gc([*arguments, "--grace", "0", "--yes", "--compact"]) == 0
    text = capsys.readouterr().out
    assert "leftover: blobs/x" in text and "quarantine: quarantine/" in text and "merged" in text
    assert list(store.list("blobs")) == blobs and list(store.leftovers()) == list(store.list("quarantine")) == []
    assert gc([*arguments, "--purge", "--prompt", "b", "--yes"]) == 0
    assert "removed 1 blobs" in capsys.readouterr().out and len(list(store.list("blobs"))) == 6
    assert verify([*arguments, "--deep"]) == 0


def test_an_fp8_corpus_of_two_tenants(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scales are calibrated after the prompts were tokenised, and only the corpus has the salts."""
    records = [RECORDS[0], RECORDS[0] | {"salt": "hush-one"}, RECORDS[0] | {"salt": "hush-two"}]
    options = options_of(tiny_model, tmp_path, records, cache_dtype="fp8_e4m3", loop="closed")
    status, text = work(options)
    assert status == 0 and "hush" not in text
    store = Store(options.store)
    assert len({parse_blob_path(path)[2] for path in store.list("blobs")}) == 9
    assert verify(["--store", options.store, "--deep"]) == 0
    assert "9 read, 9 decoded" in capsys.readouterr().out
    assert "nothing to compute" in work(options)[1]


def test_an_fp8_store_of_two_tenants_on_s3_is_recompressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For new weights, with scales of their own; then with another coder, without the model. What was replaced is collected."""
    monkeypatch.setenv("SALT_ONE", "hush-one")
    records, uri = [RECORDS[0], RECORDS[2] | {"salt": "hush-one"}], f"s3://{BUCKET}/recompressed"
    site = Site(tmp_path, records, store=uri, cache_dtype="fp8_e4m3", fp8_scale="head", loop="closed")
    assert site.compress() == 0 and "hush" not in site.said
    ids = [record["token_ids"] for record in RECORDS[::2]]
    salts = b"", b"hush-one"

    def gives(model: str, truth: list[Any]) -> bool:
        found = [pipeline.restore(site.store, model, mine, salt=salt) for mine, salt in zip(ids, salts, strict=True)]
        return all(a.tokens == len(b) and same(a.load(), c) for a, b, c in zip(found, ids, truth, strict=True))

    def pointer() -> tuple[bytes, bytes]:
        entry = read_pointers(site.store).current("mymodel", "fp8_e4m3")
        assert entry is not None
        return entry.pair

    old, first = pointer(), [site.truth(mine) for mine in ids]
    assert gives("mymodel", first)
    site.weights(5)
    assert site.recompress(salt_env=("SALT_ONE",)) == 0 and "hush" not in site.said
    new, second = pointer(), [site.truth(mine) for mine in ids]
    assert new[0] == site.fingerprint() != old[0] and read_pointers(site.store).retired.keys() == {old}
    assert gives("mymodel", second) and gives(old[0].hex(), first) and not same(first[0], second[0])
    shutil.rmtree(site.model)
    assert site.recompress(model=None, codec_only=True, coder="constriction-ans24/0.5") == 0
    last = pointer()
    assert last[0] == new[0] and last != new and read_pointers(site.store).retired.keys() == {old, new}
    made = [index.read_rows(site.store, target=a, profile=b).to_pylist() for a, b in (new, last)]
    bits = [{row["key"]: (row["fp8_scale"], row["tenant"], row["layer_checksums"]) for row in rows} for rows in made]
    assert bits[0] == bits[1] and len(bits[0]) == 6 and gives("mymodel", second)
    assert verify(["--store", uri, "--deep"]) == 0 and "18 read, 18 decoded" in capsys.readouterr().out
    assert gc(["--store", uri, "--grace", "0", "--yes"]) == 0
    assert {parse_blob_path(path)[:2] for path in site.store.list("blobs")} == {last} and gives("mymodel", second)
    capsys.readouterr()
    assert verify(["--store", uri, "--deep"]) == 0 and "6 read, 6 decoded" in capsys.readouterr().out


def test_a_lost_chunk_with_other_bits_is_made_again_with_all_that_follows(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(tiny_model, tmp_path)
    made = make(options, ShakenActor)
    made.store.delete(made.path("a", 0))
    status, text = work(options)
    assert status == 0 and "was lost and holds other bits now: 4 chunks" in text
    assert verify(["--store", options.store, "--deep"]) == 0 and "7 decoded" in capsys.readouterr().out


def test_a_store_is_decoded_by_actors_as_in_one_process(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bitstream is damaged so that only decoding shows it; both ways list it, and what follows from it."""
    made = make(options_of(tiny_model, tmp_path))
    path = made.path("a", 1)
    data = bytearray(made.store.get(path))
    data[-60] ^= 1
    overwrite(made.store, path, bytes(data[:-16]) + digest(bytes(data[:-16])))
    monkeypatch.setattr("pipeline.deep_actors.LITTLE_TOKENS", 0)
    said = []
    for elsewhere, more in (("pipeline.deep_actors._decoded", ["--local"]), ("pipeline.deep.Decoder.decode", [])):
        with monkeypatch.context() as patch:
            patch.setattr(elsewhere, None)  # nothing is done the other way
            assert verify(["--store", made.store.uri, "--deep", *more]) == 1
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert f"corrupt: {path}: " in said[0] and "7, 7 read, 4 decoded" in said[0] and "2, which follow" in said[0]


def test_a_job_that_calibrates_lists_its_store_once_and_stays_below_its_limit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, entries = [], Store.entries
    monkeypatch.setattr(Store, "entries", lambda self, folder="": listed.append(folder) or entries(self, folder))
    options = replace(options_of(tiny_model, tmp_path), verify="none")
    with pytest.raises(StorageError, match=r"predictors/.* was not written: .* would pass --max-store-bytes 9,000"):
        work(replace(options, max_store_bytes="9000"))
    assert listed.count("") == 1
    store = Store(options.store)
    assert list(store.list("prompts")) and not list(store.list("predictors")) and store_bytes(store) < 9000
    listed.clear()
    assert work(replace(options, max_store_bytes="1GB"))[0] == 0 and listed.count("") == 1
    # A limit that holds predictor and profile, and some of the chunks: calibration is charged to the quota that encoding goes on with.
    calibrated = sum(store_bytes(store, folder) for folder in ("predictors", "profiles", "prompts"))
    limit, other = calibrated + 40_000, replace(options, store=str(tmp_path / "other"))
    with pytest.raises(StorageError, match=r"\.kv was not written: .* would pass --max-store-bytes"):
        work(replace(other, max_store_bytes=str(limit)))
    assert calibrated < store_bytes(Store(other.store)) <= limit


def test_a_job_stops_at_its_limit(tiny_model: Path, tmp_path: Path) -> None:
    options = options_of(tiny_model, tmp_path)
    make(replace(options, corpus=options_of(tiny_model, tmp_path, RECORDS[2:]).corpus))
    options_of(tiny_model, tmp_path)  # the whole corpus again
    limit = store_bytes(Store(options.store)) + 40_000
    with pytest.raises(StorageError, match=r"\.kv was not written: .* would pass --max-store-bytes") as caught:
        work(replace(options, max_store_bytes=str(limit)))
    assert "\n" not in str(caught.value) and store_bytes(Store(options.store)) <= limit
    assert verify(["--store", options.store, "--deep"]) == 0
    assert work(options)[0] == 0
