"""Two jobs at once on one corpus and one store whose targets differ in bits, as they do on machines of two kinds (DESIGN 8).

The fingerprint is the same: it names weights and configuration. The arithmetic is not: one job's kernels are kept from using the
processor's vector instructions. A proxy in front of the server holds each blob that is written until the other job writes it, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.verify import main as verify
from pipeline import index
from pipeline.paths import parse_blob_path
from pipeline.store import Store
from tests.conftest import REPO_ROOT
from tests.made_store import CHUNK, numbers
from tests.s3_proxy import Answer, s3_proxy
from tests.s3_server import BUCKET, s3_server

pytestmark = pytest.mark.slow

PLAIN = {"ATEN_CPU_CAPABILITY": "default"}  # read by torch: kernels for a processor without AVX
FAMILIES = 4  # of two prompts each, which share their first two chunks
CHUNKS = 6 * FAMILIES
BITS = """
import hashlib, sys, torch
from pipeline.target import load_target, resolve_model
target = load_target(resolve_model(sys.argv[1]))
layers = target.prefill(target.new_cache(), torch.arange(3, 99))
print(hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for pair in layers for t in pair)).hexdigest())
"""


@dataclass
class Meeting:
    """What the proxy asks at every write: of two jobs with the same blob, the one that came later is let through first."""

    came: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)  # blobs that a job had made in vain
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, path: str, send: Callable[[], Answer]) -> Answer:
        if not path.endswith(".kv"):
            return send()
        with self._changed:
            self.came[path] += 1
            self._changed.notify_all()
            # The first time until the other job has started and calibrated; later they go side by side.
            self._changed.wait_for(lambda: self.came[path] > 1, timeout=10 if self.lost else 120)
            answer = send()
            if answer.status == 412:
                self.lost.add(path)
            return answer


def bits(model: Path, environment: dict[str, str]) -> str:
    """Digest of the target's cache in a process with this environment."""
    command = [sys.executable, "-c", BITS, str(model)]
    done = subprocess.run(
        command, cwd=REPO_ROOT, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_two_jobs_whose_targets_differ_in_bits(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bits(tiny_model, {}) == bits(tiny_model, PLAIN):
        pytest.skip("torch has one kind of kernels here: run this on a processor with AVX2")
    records = [
        {"id": f"{family}-{side}", "token_ids": numbers(family, 2 * CHUNK) + numbers(50 + 2 * family + side, CHUNK + 9)}
        for family in range(FAMILIES)
        for side in range(2)
    ]
    corpus, uri = tmp_path / "corpus.jsonl", f"s3://{BUCKET}/raced"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, "jobs/compress_corpus.py", "--model", str(tiny_model), "--corpus", str(corpus)]
    command += ["--store", uri, "--chunk-tokens", str(CHUNK), "--predictor", "int8", "--actors", "1", "--device", "cpu"]
    meeting = Meeting()
    with s3_server(tmp_path) as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        with s3_proxy(int(server["AWS_ENDPOINT_URL"].rpartition(":")[2]), meeting) as endpoint:
            jobs = []
            for number, kernels in enumerate(({}, PLAIN)):
                environment = os.environ | {"AWS_ENDPOINT_URL": endpoint} | kernels
                with open(tmp_path / f"log-{number}", "wb") as log:
                    jobs.append(subprocess.Popen(command, cwd=REPO_ROOT, env=environment, stdout=log, stderr=log))
            statuses = [job.wait(timeout=500) for job in jobs]
        said = [(tmp_path / f"log-{number}").read_text() for number in range(2)]
        assert statuses == [0, 0], said
        assert len(meeting.lost) >= CHUNKS // 2, "the jobs hardly met"
        assert all(f"{CHUNKS}, 0 failed" in text for text in said)  # each has decoded what the other has stored, too
        assert verify(["--store", uri, "--deep"]) == 0
        assert f"{CHUNKS}, {CHUNKS} read, {CHUNKS} decoded" in capsys.readouterr().out
        store = Store(uri)
        (target, profile) = next((t, p) for t, p, _ in map(parse_blob_path, store.list("blobs")))
        rows = index.read_rows(store, target=target, profile=profile)
        assert len(index.row_ids(rows)) == CHUNKS  # one row's worth of bits a chunk: no chain has parted
