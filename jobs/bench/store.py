"""`store`: a store that a job has left: its speed against plain fsspec, what its headers and index cost; and planning at scale.

Uploads and downloads take turns, through our store and through fsspec's own file system (s3fs for s3://), with as many threads each, on
copies of the store's blobs under a folder of their own beside it, which is removed at the end. Medians of the repeats.

transfer        upload and download: ours_bytes_per_s, plain_bytes_per_s, and share: ours over plain. Ours writes conditionally and, on
                a disk, waits until the bytes are on it; plain does neither
space           blobs, header_bytes in them, index, prompts, profiles and predictors: bytes; overhead: headers and index over blobs
planning        made-up prompts that share prefixes by thousands, in a process of its own: key_seconds to hash their tokens, plan_seconds to
                look into the index, find what is new and cut it into groups, peak_bytes of the whole process
verified        what was downloaded is what was uploaded, and the plan has the chunks it must have
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from codec.errors import UserError
from jobs.arguments import add_store
from jobs.bench.child import ask
from jobs.bench.machine import describe
from jobs.bench.turns import Note, take_turns
from pipeline import index
from pipeline.paths import BLOBS, BY_CONFIG, INDEX, PREDICTORS, PROFILES, PROMPTS, parse_index_path
from pipeline.store import Store

CHILD = "jobs.bench.store_process"


@dataclass(frozen=True)
class Settings:
    """What is measured; the names are those of the command line."""

    store: str
    objects: int = 32
    threads: int = 4
    repeats: int = 5
    prompts: int = 100_000
    tokens: int = 4000
    shared: int = 3072

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        for name, least in (
            ("objects", 1),
            ("threads", 1),
            ("repeats", 1),
            ("prompts", 0),
            ("tokens", 1),
            ("shared", 0),
        ):
            if not least <= getattr(self, name) <= 10**8:
                raise UserError(f"--{name} {getattr(self, name)} must be at least {least} and at most 100000000")
        if self.shared >= self.tokens or self.shared % 256:
            raise UserError(f"--shared {self.shared} must be a multiple of 256 and less than --tokens {self.tokens}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `store`."""
    add_store(parser)
    for name, text in (
        ("objects", "blobs that are copied, at most"), ("threads", "of each side"), ("repeats", "of each transfer"),
        ("prompts", "made-up prompts to plan, 0 for none"), ("tokens", "of a made-up prompt"),
        ("shared", "tokens of it that a thousand share"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", type=int, default=getattr(Settings, name), metavar="N", help=f"{text} (default: %(default)s)"
        )


def run(arguments: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Measure; `note` is told what is going on. Raises UserError, DataError, StorageError."""
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    settings.check()
    store = Store.open(settings.store, create=False)
    space, (moved, same) = measure_space(store), measure_transfer(store, settings, note)
    planning: dict[str, Any] = {}
    if settings.prompts:
        note(f"planning {settings.prompts:,} prompts")
        with tempfile.TemporaryDirectory(prefix="kv-store-") as folder:
            asked = {
                "store": f"{folder}/store",
                "prompts": settings.prompts,
                "tokens": settings.tokens,
                "shared": settings.shared,
            }
            planning = ask(CHILD, asked, Path(folder), "planning")
    return {
        "transfer": moved, "space": space, "planning": planning, "verified": same and planning.get("right", True),
        "settings": asdict(settings) | {"store": store.uri, "model": store.uri}, "machine": describe(),
    }  # fmt: skip


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures for people."""
    s, m, space, out = result["settings"], result["machine"], result["space"], []
    for way, f in result["transfer"].items():
        ours, plain = (f[f"{side}_bytes_per_s"] / 1e6 for side in ("ours", "plain"))
        out.append((way, f"{ours:,.1f} MB/s, plain {plain:,.1f} MB/s: {f['share']:.0%} of it"))
    out.append(("headers and index", f"{space['overhead']:.2%} of {space['blobs']:,} bytes of blobs"))
    out.append(("apart", ", ".join(f"{name} {space[name]:,}" for name in (PROFILES, PREDICTORS, PROMPTS)) + " bytes"))
    if p := result["planning"]:
        text = (
            f"keys in {p['key_seconds']:.0f} s, planned in {p['plan_seconds']:.0f} s, {p['peak_bytes'] / 2**30:.2f} GiB"
        )
        out.append((f"{s['prompts']:,} prompts", f"{text}; {p['chunks']:,} chunks, {p['stored']:,} of them stored"))
    out.append(("verified", "yes" if result["verified"] else "NO: other bytes came back, or the plan lacks chunks"))
    return [*out, ("machine", f"{m['cpu']}, {s['threads']} threads of {m['cores']} cores, load {m['load']}")]


# ---------------------------------------------------------------- space
def measure_space(store: Store) -> dict[str, Any]:
    """Bytes of a store by what they are for. UserError where it holds no blobs."""
    sizes = {name: 0 for name in (BLOBS, INDEX, PROMPTS, PROFILES, PREDICTORS)}
    for name in sizes:
        sizes[name] = sum(entry.size for entry in store.entries(name) if f"/{BY_CONFIG}/" not in entry.path)
    if not sizes[BLOBS]:
        raise UserError(f"the store {store.uri} holds no blobs; run the job first")
    headers: dict[bytes, int] = {}
    for target, profile in sorted({parse_index_path(path) for path in store.list(INDEX)}):
        columns = ["key", "header_bytes"]
        for _, table in index.iter_parts(store, target=target, profile=profile, columns=columns):
            keys = [profile + key for key in table["key"].to_pylist()]
            headers |= dict(zip(keys, table["header_bytes"].to_pylist(), strict=True))
    total = sum(headers.values())
    return sizes | {"header_bytes": total, "overhead": (total + sizes[INDEX]) / sizes[BLOBS]}


# ---------------------------------------------------------------- transfer
def measure_transfer(store: Store, settings: Settings, note: Note) -> tuple[dict[str, dict[str, float]], bool]:
    """(figures by direction, whether all came back as it was)."""
    paths = list(itertools.islice(store.list(BLOBS), settings.objects))
    data = {str(number): store.get(path) for number, path in enumerate(paths)}
    total, place = sum(map(len, data.values())), f"{store.uri}-bench-{uuid.uuid4().hex[:8]}"
    ours, plain = Store.open(place), _Plain(f"{place}-plain")
    wrong, fresh = list[str](), itertools.count()
    try:
        with ThreadPoolExecutor(settings.threads) as pool:

            def upload(put: Callable[[str, bytes], object]) -> None:
                turn = next(fresh)  # each time under new names: what is there is not written again
                list(pool.map(lambda item: put(f"up-{turn}/{item[0]}", item[1]), data.items()))

            def download(get: Callable[[str], bytes]) -> None:
                found = list(pool.map(lambda name: (name, get(f"down/{name}")), data))
                wrong.extend(name for name, got in found if got != data[name])

            for name, value in data.items():
                ours.put_new(f"down/{name}", value)
                plain.put(f"down/{name}", value)
            sides = {
                "upload ours": partial(upload, ours.put_new), "upload plain": partial(upload, plain.put),
                "download ours": partial(download, ours.get), "download plain": partial(download, plain.get),
            }  # fmt: skip
            seconds = take_turns(sides, settings.repeats, note)
    finally:
        for uri in (place, f"{place}-plain"):
            _Plain(uri).remove()
    return {way: _compared(total, seconds, way) for way in ("upload", "download")}, not wrong


def _compared(total: int, seconds: dict[str, Sequence[float]] | dict[str, list[float]], way: str) -> dict[str, float]:
    ours, plain = (total / statistics.median(seconds[f"{way} {side}"]) for side in ("ours", "plain"))
    return {"ours_bytes_per_s": ours, "plain_bytes_per_s": plain, "share": ours / plain}


class _Plain:
    """fsspec's file system as it is."""

    def __init__(self, uri: str) -> None:
        self._fs, self._root = fsspec.url_to_fs(uri)

    def put(self, path: str, data: bytes) -> None:
        """Write an object, whether there is one or not."""
        if self._fs.protocol != "s3" and "file" in self._fs.protocol:
            self._fs.makedirs(f"{self._root}/{path.rpartition('/')[0]}", exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{path}", data)

    def get(self, path: str) -> bytes:
        """Read an object."""
        found: bytes = self._fs.cat_file(f"{self._root}/{path}")
        return found

    def remove(self) -> None:
        """Everything below the URI."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)
