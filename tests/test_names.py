"""Sets of byte strings at their own size, and audits of an index that is larger than what they hold of it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from codec.checksums import chain
from pipeline import index
from pipeline.audit import audit
from pipeline.names import Names, column
from pipeline.paths import profile_path
from pipeline.store import Store
from tests.test_index import PROFILE, row

WIDTH = 5


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_names_are_a_sorted_set(size: int) -> None:
    draw = np.random.default_rng(size)
    values = [draw.integers(0, 3, WIDTH, dtype=np.uint8).tobytes() for _ in range(size)]
    names = Names(WIDTH)
    for begin in range(0, size, 7):
        names.add(column(values[begin : begin + 7], WIDTH))
    names.seal()
    ordered = sorted(set(values))
    assert list(names) == ordered and len(names) == len(ordered)
    asked = [*values, b"\3" * WIDTH, bytes(WIDTH)]
    places = names.places(column(asked, WIDTH)).tolist()
    assert places == [ordered.index(value) if value in ordered else -1 for value in asked]
    assert all((value in names) == (value in ordered) for value in asked) and values[0][:2] not in names
    for start in (b"", b"\0", values[0][:2], values[0], b"\3"):
        assert names.beginning(start) == [value for value in ordered if value.startswith(start)]


def test_no_names() -> None:
    names = Names(WIDTH).seal()
    assert len(names) == 0 and b"12345" not in names and names.beginning(b"") == []
    with pytest.raises(ValueError, match="5 bytes"):
        column([b"1234", b"123456"], WIDTH)


def test_an_audit_does_not_keep_the_rows(tmp_path: Path) -> None:
    """One chain in parts of 250 rows, with checksums of 30 layers: an audit holds less than half of these checksums."""
    store, rows, part, digest = Store.open(str(tmp_path / "store")), 10_000, 250, bytes(16)
    for begin in range(0, rows, part):
        some = []
        for number in range(begin, begin + part):
            sums = number.to_bytes(960, "big")
            facts = {"parent_digest": digest, "layer_checksums": sums, "chain_digest": chain(digest, sums)}
            some.append(row(number) | facts)
            digest = chain(digest, sums)
        index.write_part(store, some)
    tracemalloc.start()
    try:
        found = audit(store, grace=0.0, selects=lambda key: False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.rows == rows and [fault.path for fault in found.faults] == [profile_path(PROFILE)]  # there is none
    assert peak < rows * 480, peak
