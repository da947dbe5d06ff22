"""A restored cache as safetensors: `layers.N.key` and `layers.N.value`, [heads, tokens, head_dim], in the order of the layers.

The header is known before anything is decoded, so a file or a stream is written as layers come, and its length is known too: what
is cut short is no safetensors file. An FP8 cache holds its values as stored, and `scales` float32 [layers, 2 (K, V), heads] first.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from codec.errors import DataError, StorageError, UserError
from codec.formats import NumberFormat, number_format
from codec.keys import content_id
from pipeline.restoration.prefix import Pair
from pipeline.restoration.restorer import Restoration

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
SUFFIX = ".safetensors"
MAX_HEADER = 64 << 20  # bytes of a file that are its header
_MAX_NAME = 255 - len(SUFFIX) - 40  # bytes; what else a temporary file's name has


@dataclass(frozen=True)
class Layout:
    """All that stands before the first layer (header, scales), and the size of the whole in bytes."""

    head: bytes
    size: int


def layout(restored: Restoration, more: dict[str, str] | None = None) -> Layout:
    """Of a restoration that has tokens; `more`: further entries of its metadata. UserError where there are none."""
    shape, span, fmt = restored.decoder.predictor.config, restored.span, number_format(restored.cache_format)
    heads = span.heads[1] - span.heads[0]
    scales = b""
    if restored.scales is not None:
        cut = restored.scales.values[slice(*span.layers), :, slice(*span.heads)]
        scales = bytes(cut.astype("<f4").tobytes())
    entries: dict[str, Any] = {"__metadata__": _metadata(restored) | (more or {})}
    if scales:
        entries["scales"] = {
            "dtype": "F32",
            "shape": [span.layers[1] - span.layers[0], 2, heads],
            "data_offsets": [0, len(scales)],
        }
    at, size = len(scales), heads * restored.tokens * shape.head_dim * fmt.item_bytes
    for number in range(*span.layers):
        for side in ("key", "value"):
            entries[f"layers.{number}.{side}"] = {
                "dtype": DTYPES[fmt.name],
                "shape": [heads, restored.tokens, shape.head_dim],
                "data_offsets": [at, at + size],
            }
            at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text + scales, 8 + len(text) + at)


def _metadata(restored: Restoration) -> dict[str, str]:
    found = {
        "tokens": str(restored.tokens),
        "format": restored.cache_format,
        "digest": restored.digest.hex(),
        "target": restored.generation.target.hex(),
        "profile": restored.generation.profile.hex(),
        "layers": "{}:{}".format(*restored.span.layers),
        "heads": "{}:{}".format(*restored.span.heads),
    }
    return found if restored.scales is None else found | {"scale_mode": restored.scales.mode}


def layer_bytes(pair: Pair, fmt: NumberFormat) -> Iterator[bytes]:
    """One layer's K and V, [heads, tokens, head_dim], as a file holds them."""
    for values in pair:
        yield fmt.little_endian(values)


def stream(restored: Restoration, plan: Layout, layers: Iterator[tuple[int, Pair]]) -> Iterator[bytes]:
    """The whole as pieces, from its layers as they are decoded. What those raise cuts it short of plan.size."""
    fmt = number_format(restored.cache_format)
    yield plan.head
    for _, pair in layers:
        yield from layer_bytes(pair, fmt)


def read_metadata(path: Path) -> dict[str, str]:
    """The target, digest, tokens (a number), layers and heads that a restored file names. Raises DataError where it does not, or is cut
    short; StorageError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError("it has no header")
            entries = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        found = {name: str(entries["__metadata__"][name]) for name in ("target", "digest", "tokens", "layers", "heads")}
        int(found["tokens"])
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        if size != 8 + length + max(ends):
            raise ValueError("it is cut short")
        return found
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, RecursionError, AttributeError) as error:
        raise DataError(
            f"the file {path} is none that was restored, or not all of it ({type(error).__name__}); pass --overwrite or move it"
        ) from None


def file_name(identity: str) -> str:
    """A plain file name for any id: what a name cannot hold is percent-encoded; one too long is cut and gets a digest. UserError."""
    try:
        name = quote(identity, safe=" +=,@")
    except UnicodeEncodeError:
        raise UserError(f"the id {identity!r:.100} is not valid UTF-8 and gives no file name") from None
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        name = f"{name[: _MAX_NAME - 17]}~{content_id(identity.encode()).hex()[:16]}"
    return name + SUFFIX


class AtomicFile:
    """A file that appears under its name when all was written, durably, or not at all. Raises StorageError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with self._explained():
            self._file = open(self._temporary, "xb")  # noqa: SIM115 - closed by __exit__

    def write(self, data: bytes) -> None:
        """Add bytes."""
        with self._explained():
            self._file.write(data)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._explained():
                if error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    os.replace(self._temporary, self._path)
                    _fsync_folder(self._path.parent)
        finally:
            with suppress(OSError):
                self._file.close()
            with suppress(FileNotFoundError):
                os.unlink(self._temporary)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror or error}") from error


def _fsync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
