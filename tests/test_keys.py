"""Keys are the same in every process, on every machine and for every version of Python: fixed ones, and the rule written again.

A key that changes makes every stored chunk unfindable. None of the digests below may ever be edited: another rule is another
KEY_VERSION, with digests of its own.
"""

from __future__ import annotations

import glob
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.keys import chunk_keys, content_id, engine_target, root_key
from pipeline.tenancy import tenant_name
from tests.conftest import REPO_ROOT

TARGET = bytes(range(32))
IDS = [1, 2, 3, 70_000, 2**32 - 1, 0, 151_643]
FIELDS: list[dict[str, Any]] = [
    {"target": TARGET, "cache_format": "bf16", "chunk_tokens": 256},
    {"target": TARGET, "cache_format": "bf16", "chunk_tokens": 3},
    {"target": TARGET, "cache_format": "fp8_e4m3", "chunk_tokens": 3, "scales": b"\0\1scales"},
    {"target": TARGET, "cache_format": "bf16", "chunk_tokens": 3, "salt": "größe".encode()},
    {"target": TARGET, "cache_format": "bf16", "chunk_tokens": 3, "rope_regime": "dynamic"},
]
GOLDEN = [
    [
        "e561c335f2ffd7bc7522e79fb54ec5cfc79d0c6a43d0d66d842685b8ee1d2487",
        "429c3d5596fbb8365fb63f752759a50f4c0c6da93dab62cd5f49a74a79e08bbc",
    ],
    [
        "79679d170811d7b8050ac4c3c35b93480bfe35d99ccef1a4bfc9255f06f8a8f7",
        "ea20bd6e4135a75bf321408a1b10f960f207bbdab65a5ee57a53a5bd873cd953",
        "5aa3f4bde52cc415d8b24a087b3fb579c89cd2fab23137bef8685e331ffaa8d4",
        "2610fad314120eb6c3722b79b2ea14a10f4d69e989687449b2a8d9562952af71",
    ],
    [
        "11ef6293a96179f7970c776600115bdab011cfa81aa33f08f7245ad0ee3901cd",
        "fd03ff5dc96aec359b2443a9dfe528b2f8f16d9cc340c2578aa77152844ae53a",
        "d6d7868becf35f32fd130a372b26ec1c1dc835bb3700dadfef492231844dd634",
        "08a413eac9cd005d80d18907eff41008c169356761547e18a0c3863930b50e48",
    ],
    [
        "3e4c9e15b95024a283318d0a3e668845c860bf44c79861c330a59a6ecce31b6c",
        "ce18c56f142d1f8e57cd291f07a7b160774ba16ffbab25211fd9625aa97fcbef",
        "d02bfac3ec976511e9747bd6d62b8e334f92c4036c0f52d49e851965b5016b88",
        "19eeb248d082352d4df2657e34fe5fc210c26c214fd122dce6de86f4c3e66ca7",
    ],
    [
        "59728556c11e0bd981c55aa73c5f0a42e788e7a71a362d6d6c35519bd2de17fd",
        "f37978b3edf66ab0f5fc53281596243d5c798dcf8995c232c4fae11f45190545",
        "ab72a963c514487830da39f59dd31822b4df287d6d985047cc8df4a9e83c3c00",
        "65c9ef47bbf5147853c45d8482798ab723e103d018c8e4665213d57735208f90",
    ],
]

# The rule on its own, for any Python 3 without a package: python rule.py prints what GOLDEN holds.
RULE = """
import hashlib, sys

def fields(domain, *parts):
    h = hashlib.blake2b(digest_size=32)
    for part in (domain.encode(), *parts):
        h.update(len(part).to_bytes(8, "little") + part)
    return h.digest()

def keys(ids, target, cache_format, chunk_tokens, scales=b"", rope_regime="", salt=b""):
    size = chunk_tokens.to_bytes(8, "little")
    key = fields("kv-root", b"\\x01", salt, target, cache_format.encode(), scales, rope_regime.encode(), size)
    yield key.hex()
    for begin in range(0, len(ids), chunk_tokens):
        chunk = ids[begin:begin + chunk_tokens]
        key = fields("kv-chunk", key, b"".join(i.to_bytes(4, "little") for i in chunk))
        yield key.hex()
"""


def all_keys(**fields: Any) -> list[str]:
    root = root_key(**fields)
    return [key.hex() for key in (root, *chunk_keys(root, IDS, fields["chunk_tokens"]))]


def test_keys_are_the_golden_ones() -> None:
    assert [all_keys(**fields) for fields in FIELDS] == GOLDEN
    everything = [key for keys in GOLDEN for key in keys]
    assert len(set(everything)) == len(everything) == 2 + 4 * 4


def test_names_are_the_golden_ones() -> None:
    assert content_id(b"kv").hex() == "60b92982ed5167ead392dad7828e0c06fb993f6d01340ff93dd10e50440234f5"
    assert tenant_name("größe".encode()) == "de2457e29e9a9a6494a4cf1e87e54e411a6f59ca97897ab80ed3b42f999d3c1d"
    assert engine_target(TARGET, "vllm").hex() == "324e1194f78f28b7a183003a8361084523de03e005bbfe0a9dddf3fbc534969f"


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    code = "import tests.test_keys as t; print([t.all_keys(**f) for f in t.FIELDS] == t.GOLDEN)"
    environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONUTF8": "0"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=REPO_ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout == "True\n"


def pythons() -> list[str]:
    """Every Python 3 on this machine that starts, and the one that runs the tests."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = {os.path.realpath(path) for folder in folders for path in glob.glob(f"{folder}/python3.[0-9]*")}
    named = sorted(path for path in found if path.rpartition("python3.")[2].isdigit())
    return [
        sys.executable,
        *(path for path in named if not subprocess.run([path, "-c", ""], capture_output=True).returncode),
    ]


def test_keys_do_not_depend_on_the_version_of_python(tmp_path: Path) -> None:
    lines = "".join(f"print(list(keys({IDS!r}, **{fields!r})))\n" for fields in FIELDS)
    (tmp_path / "rule.py").write_text(RULE + lines, encoding="utf-8")
    for python in pythons():
        out = subprocess.run([python, str(tmp_path / "rule.py")], capture_output=True, text=True, check=True)
        assert out.stdout == "".join(f"{keys}\n" for keys in GOLDEN), python


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    chunk_tokens=st.integers(1, 9),
    salt=st.binary(max_size=9),
    scales=st.binary(max_size=9),
    rope_regime=st.text(max_size=4),
    cache_format=st.sampled_from(["bf16", "fp8_e4m3"]),
)
@settings(max_examples=50, deadline=None)
def test_keys_follow_the_rule(ids: list[int], **fields: Any) -> None:
    rule: dict[str, Any] = {"hashlib": hashlib}
    exec(RULE, rule)
    root = root_key(target=TARGET, **fields)
    for given_ids in (ids, np.array(ids, dtype=np.uint32)):
        keys = [root, *chunk_keys(root, given_ids, fields["chunk_tokens"])]
        assert [key.hex() for key in keys] == list(rule["keys"](ids, TARGET, **fields))
