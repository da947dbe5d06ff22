"""Twenty kills at points drawn from a seed: actors, the driver and the S3 server, each in the middle of a write to the store.

A proxy in front of the server sees every write. At those that the seed names it holds all of them, kills, starts the server
again if that was the victim, and looks at the store as it stands. The write itself was lost, or it was done and nobody heard.
Another seed: KV_KILLS_SEED=7.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.verify import main as verify
from pipeline import index
from pipeline.audit import ORPHANED, audit
from pipeline.paths import parse_blob_path
from pipeline.store import Store
from tests.conftest import REPO_ROOT
from tests.made_store import CHUNK, numbers
from tests.ray_head import Head, ray_head
from tests.s3_proxy import Answer, s3_proxy
from tests.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("KV_KILLS_SEED", "5"))
VICTIMS = {"actor": 9, "driver": 5, "server": 6}
# in the titles of their processes
ACTORS = (b"Tokenise", b"Calibrator", b"EncodeActor", b"VerifyActor", b"ProgressBoard")
MOST_WRITES = 3  # between two kills
PAIRS = 14  # of prompts that share their first chunk
PREFIX = "killed"
COUNTED = ("prompts/", "predictors/", "profiles/", "blobs/", "index/")


@dataclass(frozen=True)
class Kill:
    """Whom, at which write after the last kill, and whether the write is done before."""

    victim: str
    writes: int
    done: bool


def kills_of(seed: int) -> list[Kill]:
    draw = random.Random(seed)
    victims = [name for name, count in VICTIMS.items() for _ in range(count)]
    draw.shuffle(victims)
    return [Kill(victim, draw.randint(1, MOST_WRITES), draw.random() < 0.5) for victim in victims]


@dataclass
class Killer:
    """What the proxy asks at every write."""

    server: S3Server
    look: Callable[[], None]  # at the store, after each kill
    waiting: list[Kill]
    head: Head | None = None
    done: list[str] = field(default_factory=list)
    driver: subprocess.Popen[bytes] | None = None
    created: Counter[str] = field(default_factory=Counter)  # answers by path that said: this write made the object
    writes: int = 0  # since the last kill
    failure: BaseException | None = None
    _actor: int = 0  # the process that the next kill of an actor ends
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, path: str, send: Callable[[], Answer]) -> Answer | None:
        with self._lock:
            kill = self._due(path)
            answer = send() if kill is None or kill.done else None
            if answer is not None and answer.status == 200:
                self.created[path] += 1
            if kill is None:
                return answer
            try:
                self._strike(kill, path)
            except BaseException as error:  # for the test's own thread
                self.failure = self.failure or error
            return None

    def _due(self, path: str) -> Kill | None:
        if not path.removeprefix(f"{PREFIX}/").startswith(COUNTED):
            return None
        self.writes += 1
        if not self.waiting or self.writes < self.waiting[0].writes:
            return None
        victim, actors = self.waiting[0].victim, self._actors()
        if victim == "actor" and not actors:
            return None  # the driver itself is writing; it will come to that
        if victim == "driver" and (self.driver is None or self.driver.poll() is not None):
            return None  # an actor that it left behind is writing
        if actors:
            self._actor = random.Random(f"{SEED} {len(self.done)}").choice(actors)
        return self.waiting.pop(0)

    def _strike(self, kill: Kill, path: str) -> None:
        self.writes = 0
        self.done.append(f"{kill.victim} {'after' if kill.done else 'before'} {path}")
        if kill.victim == "server":
            self.server.kill()
            self.server.restart()
        elif kill.victim == "driver":
            assert self.driver is not None
            self.driver.kill()
            self.driver.wait()
        else:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._actor, signal.SIGKILL)
        self.look()

    def _actors(self) -> list[int]:
        """Processes of the head's session that hold an actor; Ray writes its name into their command lines."""
        found, session = [], self.head.pid if self.head else 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                name = (folder / "cmdline").read_bytes()
                if (
                    name.startswith(b"ray::")
                    and any(kind in name for kind in ACTORS)
                    and os.getsid(int(folder.name)) == session
                ):
                    found.append(int(folder.name))
            except (OSError, ProcessLookupError):
                continue  # it has just ended
        return sorted(found)


def write_corpus(path: Path) -> int:
    """Pairs of prompts: one chunk shared, then two of each one's own. How many distinct chunks that is."""
    records = [
        {"id": f"{pair}-{side}", "token_ids": numbers(pair, CHUNK) + numbers(1000 + 2 * pair + side, CHUNK + 7)}
        for pair in range(PAIRS)
        for side in range(2)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 5 * PAIRS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """A server whose files stay when it is killed; the test itself speaks to it without the proxy."""
    started = S3Server(tmp_path, tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started
    started.stop()


def test_twenty_kills_leave_a_store_complete_and_nothing_twice(
    server: S3Server, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"KV_KILLS_SEED={SEED} replays this")
    uri, corpus = f"s3://{BUCKET}/{PREFIX}", tmp_path / "corpus.jsonl"
    chunks = write_corpus(corpus)

    def look() -> None:
        """At any moment: whatever can be seen is whole, no row lacks its blob; a blob may still lack its row."""
        faults = audit(Store(uri), grace=3600.0, selects=lambda key: True).faults
        assert [fault for fault in faults if fault.kind != ORPHANED] == [], killer.done

    killer = Killer(server, look, kills_of(SEED))
    with s3_proxy(server.port, killer) as endpoint:
        environment = os.environ | {"AWS_ENDPOINT_URL": endpoint}
        with ray_head(tmp_path, 4, environment) as killer.head:
            command = [sys.executable, "jobs/compress_corpus.py", "--model", str(tiny_model), "--store", uri]
            command += ["--corpus", str(corpus), "--chunk-tokens", str(CHUNK), "--predictor", "int8", "--loop", "open"]
            command += ["--device", "cpu", "--actors", "1"]
            run_until_done(killer, command, environment | {"RAY_ADDRESS": killer.head.address}, tmp_path / "job.log")

    assert Counter(kill.split()[0] for kill in killer.done) == VICTIMS, killer.done
    assert verify(["--store", uri, "--deep"]) == 0, killer.done
    assert f"{chunks}, {chunks} read, {chunks} decoded" in capsys.readouterr().out
    twice = {path: count for path, count in killer.created.items() if count > 1}
    assert twice == {} and sum(path.endswith(".kv") for path in killer.created) == chunks
    store = Store(uri)
    assert list(store.list("unverified")) == [], "chunks of a killed run were not verified by a later one"
    (target, profile) = next((t, p) for t, p, _ in map(parse_blob_path, store.list("blobs")))
    rows = index.read_rows(store, target=target, profile=profile)
    assert len(rows) == len(index.row_ids(rows)) == chunks


def run_until_done(killer: Killer, command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run the job again until it ends well; it may fail only where something was killed under it."""
    for _ in range(len(killer.waiting) + 1):
        before = len(killer.done)
        with open(log, "wb") as out:
            killer.driver = subprocess.Popen(command, cwd=REPO_ROOT, env=environment, stdout=out, stderr=out)
            status = killer.driver.wait(timeout=300)
        if killer.failure is not None:
            raise killer.failure
        if status == 0:
            assert killer.waiting == [], "the work ended before the kills"
            return
        assert len(killer.done) > before, log.read_text()
    pytest.fail(f"the job failed after every kill: {killer.done}; {log.read_text()}")
