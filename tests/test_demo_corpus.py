"""The demo corpus: the script itself, and what the demo needs of its output."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.corpus import Record, read_corpus
from pipeline.render import token_ids


def run(repo_root: Path, *arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "jobs/demo_corpus.py", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True, check=False)


def test_same_file_every_time(repo_root: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / "new" / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert run(repo_root, "--out", str(a)).stdout == f"{a}: 8 prompts\n"
    assert run(repo_root, "--out", str(b), hash_seed="7").returncode == 0
    assert run(repo_root, "--out", str(c), "--seed", "1").returncode == 0
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()
    assert sorted(path.name for path in a.parent.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_records(repo_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert run(repo_root, "--out", str(path), "--prompts", "40").returncode == 0
    found = list(read_corpus(str(path)))
    assert len(found) == 40 and all(isinstance(record, Record) and record.kind == "messages" for record in found)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 40
    for line in lines:
        assert 3 <= len(line["tools"]) <= 6
        for tool in line["tools"]:
            assert tool["type"] == "function" and tool["function"]["description"]
            assert set(tool["function"]["parameters"]) == {"type", "properties", "required"}
        assert " at 0x" not in json.dumps(line["tools"])
        assert any(m["role"] == "tool" and "def " in m["content"] for m in line["messages"])


def test_bad_arguments(repo_root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (["--out", str(tmp_path / "file" / "x")], ["--out", str(tmp_path / "x"), "--prompts", "0"], []):
        result = run(repo_root, *arguments)
        assert result.returncode == 2 and "error:" in result.stderr and "Traceback" not in result.stderr


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_size_and_sharing_for_the_real_tokenizer(smollm2_gguf: Path, repo_root: Path, tmp_path: Path) -> None:
    from pipeline.target import load_tokenizer, resolve_model

    path = tmp_path / "a.jsonl"
    assert run(repo_root, "--out", str(path)).returncode == 0
    tokenizer = load_tokenizer(resolve_model(smollm2_gguf))
    records = [record for record in read_corpus(str(path)) if isinstance(record, Record)]
    prompts = [token_ids(record, tokenizer, context_length=8192) for record in records]
    lengths = [len(ids) for ids in prompts]
    assert sum(lengths) < 9000 and min(lengths) > 700 and max(lengths) < 1500
    for i, ids in enumerate(prompts):
        assert max(common(ids, other) for j, other in enumerate(prompts) if j != i) >= 512
