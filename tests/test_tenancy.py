"""Tenants: the same prompt under two salts shares nothing, and no salt is stored or shown."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from codec.keys import chunk_keys, root_key
from pipeline import index
from pipeline.corpus import BadRecord, Record, parse_record, read_corpus
from pipeline.options import read_salt
from pipeline.prepare import prepare
from pipeline.prompts import PART_SCHEMA, PromptReader, load_part, part_bytes, part_name
from pipeline.tenancy import Roots, tenant_name
from tests.made_store import CHUNK, SHARED, files, make, options_of, tokenise

SALTS = ("hush-hush-one", "ü-secret-two")


def salted(salt: str | None, name: str = "p") -> dict[str, Any]:
    return {"id": name, "token_ids": SHARED, **({} if salt is None else {"salt": salt})}


def test_the_same_prompt_under_two_salts_shares_nothing(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        made = make(options_of(tiny_model, tmp_path, [salted(salt) for salt in (None, *SALTS)]))
    names = ["", *(hashlib.blake2b(salt.encode(), digest_size=32).hexdigest() for salt in SALTS)]
    assert [p.tenant for p in made.plan.prompts] == names
    assert len(made.plan.chunks) == 6 and made.plan.shared == 0 and len(made.plan.groups) == 3
    assert len({p.part for p in made.plan.prompts}) == 3
    rows = index.read_rows(made.store, target=made.job.target, profile=made.job.profile).to_pylist()
    for name in names:
        keys = made.keys("p", name)
        own = [row for row in rows if row["tenant"] == name]
        assert {row["key"] for row in own} == set(keys)
        assert {tuple(chunk_keys(row["root_key"], SHARED, CHUNK)) for row in own} == {tuple(keys)}
    everything = b"".join(path.encode() + data for path, data in files(made.store).items())
    for part in made.store.list("prompts"):  # compressed pages would hide it
        everything += json.dumps(load_part(made.store, part).to_pylist()).encode()
    everything += repr(rows).encode() + caplog.text.encode() + "".join(capsys.readouterr()).encode()
    everything += repr((made.plan, made.results, made.job)).encode()
    for salt in SALTS:
        assert salt.encode() not in everything and json.dumps(salt).encode() not in everything


def test_a_salt_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_TEST_SALT", os.fsdecode(b"\xff\x01x"))
    assert read_salt("KV_TEST_SALT") == b"\xff\x01x"


def test_a_salt_in_a_record_and_in_the_environment_is_the_same_tenant(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_record = make(options_of(tiny_model, tmp_path, [salted(SALTS[0])]))
    monkeypatch.setenv("KV_TEST_SALT", SALTS[0])
    again = make(options_of(tiny_model, tmp_path, [salted(None)], salt_env="KV_TEST_SALT"))
    assert again.plan.groups == [] and again.keys("p", tenant_name(SALTS[0].encode())) == by_record.keys(
        "p", tenant_name(SALTS[0].encode())
    )


def test_both_at_once_are_refused_without_a_word_of_either(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_TEST_SALT", SALTS[0])
    options = options_of(tiny_model, tmp_path, [salted(SALTS[1])], salt_env="KV_TEST_SALT")
    with pytest.raises(Exception, match="has a salt of its own, and --salt-env") as caught:
        tokenise(prepare(options))
    assert not any(salt in str(caught.value) for salt in SALTS)


def test_roots_are_those_of_the_keys(tiny_model: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"target": bytes(32), "cache_format": "bf16", "chunk_tokens": 7, "rope_regime": "dynamic"}
    roots = Roots.make(scales=b"s", salt=b"mine", **fields)
    assert roots.root == root_key(scales=b"s", salt=b"mine", **fields) and b"mine" not in repr(roots).encode()
    assert roots.of(None) == (tenant_name(b"mine"), roots.root)
    assert roots.of("other") == (tenant_name(b"other"), root_key(scales=b"s", salt=b"other", **fields))
    assert Roots.make(scales=b"", salt=b"", **fields).of(None) == ("", root_key(**fields))


# ---------------------------------------------------------------- the corpus
@pytest.mark.parametrize(
    ("salt", "reason"),
    [(17, "salt must be a string, not an integer"), ("", "salt is empty"), (["x"], "salt must be a string")],
)
def test_a_bad_salt_is_a_bad_record(salt: object, reason: str) -> None:
    out = parse_record({"id": "a", "text": "x", "salt": salt}, "f:1")
    assert isinstance(out, BadRecord) and reason in out.reason


def test_a_records_salt_is_read_and_not_shown(tmp_path: Path) -> None:
    out = parse_record({"id": "a", "text": "x", "salt": SALTS[0]}, "f:1")
    assert isinstance(out, Record) and out.salt == SALTS[0] and SALTS[0] not in repr(out)
    assert out.content_hash() == replace(out, salt=None).content_hash()
    half = parse_record({"id": "a", "text": "x", "salt": "hush\ud800"}, "f:1")
    assert isinstance(half, BadRecord) and "hush" not in half.reason
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["x", "y"], "salt": [None, "s"]}), tmp_path / "c.parquet")
    assert [r.salt for r in read_corpus(str(tmp_path / "c.parquet")) if isinstance(r, Record)] == [None, "s"]


# ---------------------------------------------------------------- parts
def test_parts_written_before_there_were_tenants_are_still_read(tiny_model: Path, tmp_path: Path) -> None:
    made = make(options_of(tiny_model, tmp_path))
    (path,) = made.store.list("prompts")
    table = load_part(made.store, path)
    older = tmp_path / "store" / path
    pq.write_table(table.drop_columns(["tenant"]), older)
    assert load_part(made.store, path).equals(table) and set(table["tenant"].to_pylist()) == {""}
    assert PromptReader(made.store).tokens(path, 2, 70).dtype == np.int64


def test_a_part_is_of_one_tenant() -> None:
    rows = [{"id": t, "payload": "{}", "token_ids": [1], "n_tokens": 1, "tenant": t} for t in ("", "x")]
    with pytest.raises(ValueError, match="one tenant"):
        part_name(rows)
    assert pq.read_table(pa.BufferReader(part_bytes(rows[1:]))).schema.names == PART_SCHEMA.names
