"""The restore job, from options to exit status: records -> token ids -> stored prefixes -> decode actors -> one file a prompt."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from codec.errors import StorageError, UserError
from codec.keys import content_id
from pipeline import ray_runtime
from pipeline.corpus import EXTENSIONS, BadRecord, Record, list_corpus, parse_record, read_corpus
from pipeline.model_source import load_tokenizer, resolve_model
from pipeline.options import CACHE_FORMATS, DEVICES, read_salt
from pipeline.progress import Counts, Display
from pipeline.ray_runtime import Cluster
from pipeline.render import BadPrompt, token_ids
from pipeline.report import duration, say
from pipeline.restoration.batch import Outcome, Request
from pipeline.restoration.catalogue import MAX_TOKENS, Catalogue, token_array
from pipeline.restoration.earlier import EarlierFiles
from pipeline.restoration.files import file_name
from pipeline.restoration.pool import DecodePool, PoolSettings, make_batches
from pipeline.restoration.span import parse_range
from pipeline.restoration.targets import find_target
from pipeline.store import Store
from pipeline.work import Device

WINDOW = 256  # requests looked at together, so that those that share a prefix are decoded together
MAX_FILE = 64 << 20  # bytes of a prompt file
ACTOR_BYTES = 1 << 30  # memory that an actor needs besides predictor and batch


@dataclass(frozen=True)
class RestoreOptions:
    """Everything `jobs/restore.py` can be told; the names are those of its command line."""

    store: str
    model: str
    out: str
    corpus: str | None = None
    prompt_file: str | None = None
    tokenizer: str | None = None
    cache_dtype: str | None = None
    salt_env: str | None = None
    heads: str | None = None
    layers: str | None = None
    overwrite: bool = False
    skip_bad: bool = False
    limit: int | None = None
    actors: int | None = None
    device: str = "auto"
    deadline: float = 600.0
    batch_tokens: int = 4096
    shared_fs: bool = False

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        if (self.corpus is None) == (self.prompt_file is None):
            raise UserError("pass one of --corpus and --prompt-file")
        parse_range("--heads", self.heads)
        parse_range("--layers", self.layers)
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_FORMATS:
            raise UserError(f"--cache-dtype {self.cache_dtype!r} is not known; choose {' or '.join(CACHE_FORMATS)}")
        if self.device not in DEVICES:
            raise UserError(f"--device {self.device!r} is not known; choose {' or '.join(DEVICES)}")
        for name, value in (("--limit", self.limit), ("--actors", self.actors), ("--batch-tokens", self.batch_tokens)):
            if value is not None and not 1 <= value < 1 << 31:
                raise UserError(f"{name} {value} must be at least 1")
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise UserError(f"--deadline {self.deadline} is no positive number of seconds")
        read_salt(self.salt_env)


@dataclass
class Totals:
    """What a run came to so far."""

    asked: int = 0
    kept: int = 0  # files that were there
    files: int = 0
    tokens: int = 0
    bytes: int = 0
    nothing: int = 0  # prompts of which nothing is stored
    damaged: int = 0
    bad: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.files += bool(outcome.tokens)
        self.tokens += outcome.tokens
        self.bytes += outcome.bytes if outcome.tokens else 0
        self.damaged += outcome.damaged
        self.nothing += not outcome.tokens and not outcome.damaged and not outcome.error
        if outcome.error:
            self.errors.append(outcome.error)


def run(options: RestoreOptions, notes: Console, result: Console) -> int:
    """Restore what is asked for. 0 if all that is stored of it is in the files, 1 if something stored was damaged or failed.

    Raises UserError, DataError, StorageError.
    """
    options.check()
    store = Store.open(options.store, create=False)
    out = _folder(options.out)
    target = find_target(store, options.model, options.cache_dtype)
    records = _Records(options, notes)
    catalogue = Catalogue(store, target)
    say(notes, f"{len(catalogue):,} chunks of target {target.hex()[:16]} are stored")
    begin = time.monotonic()
    with ray_runtime.connected(options.actors) as cluster:
        totals = _restore(options, catalogue, records, out, cluster, notes)
    _report(totals, time.monotonic() - begin, notes, result)
    if totals.asked and not totals.files and not totals.kept and not totals.errors and not totals.damaged:
        notes.print("nothing of any of these prompts is stored", highlight=False, soft_wrap=True)
        return 1
    return 1 if totals.errors or totals.damaged else 0


def _restore(
    options: RestoreOptions, catalogue: Catalogue, records: _Records, out: Path, cluster: Cluster, notes: Console
) -> Totals:
    if cluster.nodes > 1 and not options.shared_fs:
        raise UserError(
            f"--out {out} would be another folder on each of {cluster.nodes} nodes; pass --shared-fs if it is shared"
        )
    settings = _settings(options, catalogue, cluster)
    totals = Totals()
    pool = DecodePool(settings)
    requests = _requests(options, catalogue, records, out, totals)
    batches = make_batches(requests, options.batch_tokens, WINDOW)
    with RestoreDisplay(notes, totals):
        for outcome in pool.run(batches):
            totals.add(outcome)
            for note in outcome.notes if outcome.damaged else ():
                say(notes, f"{outcome.id}: {note}", prompt=outcome.id)
    totals.bad = records.bad
    if pool.replaced:
        say(notes, f"{pool.replaced} decode actors were replaced")
    return totals


def _settings(options: RestoreOptions, catalogue: Catalogue, cluster: Cluster) -> PoolSettings:
    ray_runtime.check_shared(
        cluster, store_is_local=catalogue.store.is_local, shared_fs=options.shared_fs, uri=catalogue.store.uri
    )
    device = ray_runtime.choose_device(options.device, cluster)
    pools = ray_runtime.divide(
        cluster,
        device=device,
        actors=options.actors,
        gpus_per_actor=None,
        groups=1 << 20,
        verify=False,
        actor_bytes=2 * catalogue.predictor_bytes() + ACTOR_BYTES,
    )
    where = Device(device, False, max(1, int(pools.encode_cpus)))
    ranges = parse_range("--layers", options.layers), parse_range("--heads", options.heads)
    return PoolSettings(
        catalogue.store, where, pools.encoders, pools.encode_cpus, pools.encode_gpus, options.deadline, *ranges
    )


def _requests(
    options: RestoreOptions, catalogue: Catalogue, records: _Records, out: Path, totals: Totals
) -> Iterator[Request]:
    """A request a record whose file is not there yet, or holds less than is stored by now."""
    salt = read_salt(options.salt_env)
    earlier = EarlierFiles(catalogue, parse_range("--layers", options.layers), parse_range("--heads", options.heads))
    seen: dict[str, bytes] = {}
    for identity, ids in records:
        array = token_array(ids)
        known = seen.get(identity)
        digest = seen.setdefault(identity, content_id(array.tobytes()))
        if known is not None:
            if content_id(array.tobytes()) != digest:
                raise UserError(f"the id {identity!r} stands for two different prompts; give each an id of its own")
            continue  # a copy
        totals.asked += 1
        path = out / file_name(identity)
        matches, found = catalogue.find(array, salt)
        if not options.overwrite and path.exists() and earlier.is_whole(path, array, salt, matches, found):
            totals.kept += 1
            continue
        yield Request(identity, array, tuple(matches), str(path), tuple(found))


class _Records:
    """(id, token ids) of the prompts asked for, read as they are needed."""

    def __init__(self, options: RestoreOptions, notes: Console) -> None:
        self._options, self._notes = options, notes
        self._files = list_corpus(options.corpus) if options.corpus is not None else []
        self._tokenizer: Any = None
        self.bad = 0

    def __iter__(self) -> Iterator[tuple[str, list[int]]]:
        taken = 0
        for record in self._read():
            if taken == self._options.limit:
                return
            try:
                if isinstance(record, BadRecord):
                    raise UserError(f"{record.source}: {record.reason}; mend the corpus or pass --skip-bad")
                ids = self._ids(record)
            except UserError as error:
                if not self._options.skip_bad or not isinstance(record, BadRecord | Record):
                    raise
                say(self._notes, f"skipped {error}")
                self.bad += 1
                continue
            taken += 1
            yield record.id, ids

    def _read(self) -> Iterator[Record | BadRecord]:
        if self._options.prompt_file is not None:
            yield read_prompt_file(self._options.prompt_file)
        for file in self._files:
            yield from read_corpus(file)

    def _ids(self, record: Record) -> list[int]:
        if record.kind == "token_ids":
            return [int(token) for token in record.payload["token_ids"]]
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._options.tokenizer or self._options.model)
        try:
            return token_ids(record, self._tokenizer, context_length=MAX_TOKENS)
        except BadPrompt as error:
            raise UserError(str(error)) from error


def _tokenizer(model: str) -> Any:
    try:
        return load_tokenizer(resolve_model(model))
    except UserError as error:
        raise UserError(
            f"text and messages need the model's tokenizer, and {error}; pass --tokenizer, or records of token_ids"
        ) from error


def read_prompt_file(path: str) -> Record:
    """One prompt: a record of a corpus in *.json (its id may be left out), or text in any other file. Raises UserError."""
    file = Path(path)
    if path.lower().endswith(EXTENSIONS):
        raise UserError(f"the prompt file {path} is a corpus by its name; pass it with --corpus")
    try:
        if file.stat().st_size > MAX_FILE:
            raise UserError(f"the prompt file {path} is over {MAX_FILE >> 20} MiB; put the prompts into a corpus")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompt file {path} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        ) from error
    if file.suffix != ".json":
        return _checked(parse_record({"id": file.stem, "text": text}, path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the prompt file {path} is not valid JSON ({error})") from error
    if isinstance(value, dict):
        value.setdefault("id", file.stem)
    return _checked(parse_record(value, path))


def _checked(record: Record | BadRecord) -> Record:
    if isinstance(record, BadRecord):
        raise UserError(f"{record.source}: {record.reason}")
    return record


def _folder(out: str) -> Path:
    path = Path(out).expanduser()
    if "://" in out:
        raise UserError(f"--out {out} must be a folder on this machine or a mounted file system")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the folder --out {out} cannot be made ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise StorageError(f"the folder --out {out} cannot be written")
    return path.resolve()


class RestoreDisplay(Display):
    """Files and tokens so far."""

    def __init__(self, console: Console, totals: Totals) -> None:
        def read() -> Counts:
            return Counts(tokens=totals.tokens, chunks=totals.files + totals.nothing, raw_bytes=totals.bytes)

        super().__init__(console, read, total_chunks=0, total_verify=0)
        self._totals = totals

    def line(self, counts: Counts) -> str:
        """One line of plain text."""
        found = self._totals
        done = found.files + found.nothing + len(found.errors)
        return f"{done:,} of {found.asked - found.kept:,} prompts read so far, {found.tokens:,} tokens, {found.bytes:,} bytes"


def _report(totals: Totals, seconds: float, notes: Console, result: Console) -> None:
    for error in totals.errors:
        say(notes, f"failed: {error}")
    rows = [
        ("prompts", totals.asked), ("files written", totals.files), ("files kept", totals.kept), ("tokens", totals.tokens),
        ("bytes", totals.bytes), ("nothing stored", totals.nothing), ("damaged", totals.damaged), ("failed", len(totals.errors)),
        ("bad records", totals.bad),
    ]  # fmt: skip
    say(result, f"restored in {duration(seconds)}")
    for name, value in rows:
        say(result, f"  {name:<18} {value:,}")
