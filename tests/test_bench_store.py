"""jobs/benchmark.py store on a small store on disk."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from codec.errors import UserError
from jobs.bench import store as bench
from pipeline import index
from pipeline.store import Store
from tests.made_store import Made, files


def arguments(uri: str, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(
        ["--store", uri, "--repeats", "2", "--prompts", "2100", "--tokens", "600", "--shared", "512", *more]
    )


def test_figures_of_a_small_store(made: Made, tmp_path: Path) -> None:
    before, said = files(made.store), list[str]()
    result = bench.run(arguments(made.store.uri), said.append)
    assert result["verified"] is True and said
    for way in ("upload", "download"):
        moved = result["transfer"][way]
        assert (
            moved["share"] == pytest.approx(moved["ours_bytes_per_s"] / moved["plain_bytes_per_s"])
            and moved["share"] > 0
        )
    table = index.read_rows(made.store, target=made.job.target, profile=made.job.profile)
    space, headers = result["space"], sum(table["header_bytes"].to_pylist())
    assert space["blobs"] == sum(table["stored_bytes"].to_pylist()) and space["header_bytes"] == headers
    assert space["overhead"] == pytest.approx((headers + space["index"]) / space["blobs"])
    # Three families: two chunks that all of one share, and one of each prompt's own; the first family is stored.
    planning = result["planning"]
    assert (planning["chunks"], planning["occurrences"], planning["stored"]) == (3 * 2 + 2100, 3 * 2100, 2 + 1000)
    assert files(made.store) == before and [path.name for path in tmp_path.iterdir()] == ["store"]
    json.dumps(result)
    shown = dict(bench.rows(result))
    assert "2,106 chunks" in shown["2,100 prompts"]
    assert "NO" in dict(bench.rows(result | {"verified": False}))["verified"]


@pytest.mark.parametrize(
    ("more", "message"), [(["--shared", "600"], "--shared 600"), (["--repeats", "0"], "--repeats 0"), ([], "no blobs")]
)
def test_what_cannot_be_measured(tmp_path: Path, more: list[str], message: str) -> None:
    store = Store.open(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=message):
        bench.run(arguments(store.uri, *more), lambda text: None)
