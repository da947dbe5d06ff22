"""Digests of weight files: remembered for one state of one file, made anew for any other."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from codec.errors import UserError
from pipeline import fingerprints
from pipeline.fingerprints import file_digest
from pipeline.model_source import resolve_model
from tests.conftest import write_tiny_llama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "SETTLED_NS", -1)
    fingerprints._digest_of.cache_clear()
    return tmp_path / "cache" / "fingerprints"


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def another_process() -> None:
    fingerprints._digest_of.cache_clear()


def test_a_file_is_read_once_in_each_state(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert file_digest(file) == digest(b"one") and len(list(cache.iterdir())) == 1
    another_process()
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", None)  # it is not read
        assert file_digest(file) == digest(b"one")
    times = file.stat()
    time.sleep(0.02)  # file systems count time in ticks
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, and the time put back
    another_process()
    assert file_digest(file) == digest(b"two")
    (tmp_path / "new").write_bytes(b"six")
    os.replace(tmp_path / "new", file)
    assert file_digest(file) == digest(b"six")


def test_what_was_changed_a_moment_ago_is_not_remembered(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "SETTLED_NS", 3600 * 10**9)
    (tmp_path / "weights").write_bytes(b"x")
    assert file_digest(tmp_path / "weights") == digest(b"x") and not cache.exists()


def test_what_is_no_digest_is_made_again(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    file_digest(file)
    for damage in (b"", b"zz", b"ab", b"\xff"):
        (kept,) = cache.iterdir()
        kept.write_bytes(damage)
        another_process()
        assert file_digest(file) == digest(b"one")


def test_a_file_that_changes_while_it_is_read_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    state = fingerprints._state(file)
    file.write_bytes(b"longer")
    with pytest.raises(UserError, match="is being written"):
        fingerprints._digest_of(state)
    with pytest.raises(UserError, match="cannot be read"):
        file_digest(tmp_path / "none")


def test_without_a_cache_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CACHE_DIR", "off")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fingerprints, "SETTLED_NS", -1)
    another_process()
    (tmp_path / "weights").write_bytes(b"x")
    assert file_digest(tmp_path / "weights") == digest(b"x") and not (tmp_path / "home").exists()


def test_weights_that_change_under_the_same_name_are_another_target(cache: Path, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    first = resolve_model(model).fingerprint()
    another_process()
    assert resolve_model(model).fingerprint() == first and len(list(cache.iterdir())) == 1
    time.sleep(0.02)
    write_tiny_llama(model, seed=1)
    assert resolve_model(model).fingerprint() != first
