"""Caches that an engine computed, as files that wait to be compressed: one safetensors file a prompt.

layers.N.key and layers.N.value, [kv_heads, tokens, head_dim] as in restored files; token_ids, int64 [tokens]; of an FP8 cache also
scales, float32 [layers, 2 (K, V), heads]. A file is named for its tokens, so a prompt that comes again is written once. Its checksum
covers tokens and values: what was damaged while it waited is never stored as an engine's cache.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from codec.checksums import digest
from codec.errors import DataError, StorageError, UserError
from codec.formats import FORMATS, number_format
from codec.keys import content_id
from codec.scales import SCALE_MODES, CacheScales
from pipeline.restoration.files import SUFFIX, AtomicFile

Pair = tuple[Tensor, Tensor]
MAX_FILE = 1 << 36  # bytes; what is larger is no cache of one prompt
MAX_LAYERS = 4096
_MAX_HEADER = 1 << 24


@dataclass(frozen=True)
class SpooledCache:
    """One prompt's cache. ids: int64 [T]; layers: K and V, [kv_heads, T, head_dim] in the format; scales: of an FP8 cache."""

    ids: Tensor
    layers: list[Pair]
    cache_format: str
    scales: CacheScales | None = None


class Spool:
    """A folder of such files."""

    def __init__(self, folder: str | Path, limit: int | None = None) -> None:
        """limit: bytes that the folder may hold; what would be more is refused. UserError where there is no such folder."""
        self.folder, self._limit = Path(folder), limit
        if not self.folder.is_dir():
            raise UserError(f"the folder {str(folder)!r} for saved caches does not exist; make it first")

    def put(self, cache: SpooledCache) -> Path:
        """Write a cache, or find it written. Raises StorageError."""
        path = self.folder / f"{content_id(cache.ids.numpy().astype('<i8').tobytes()).hex()}{SUFFIX}"
        if path.exists():
            return path
        data = pack(cache)
        if self._limit is not None and sum(file.stat().st_size for file in self.files()) + len(data) > self._limit:
            raise StorageError(
                f"the folder {str(self.folder)!r} for saved caches has reached its limit of {self._limit:,} bytes"
            )
        with AtomicFile(path) as file:
            file.write(data)
        return path

    def files(self) -> list[Path]:
        """Those that are whole, by name."""
        return sorted(path for path in self.folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))


def pack(cache: SpooledCache) -> bytes:
    """A cache as a file holds it."""
    tensors = {"token_ids": cache.ids}
    for number, pair in enumerate(cache.layers):
        tensors |= {f"layers.{number}.{side}": t for side, t in zip(("key", "value"), pair, strict=True)}
    more = {"format": cache.cache_format}
    if cache.scales is not None:
        tensors["scales"] = torch.from_numpy(cache.scales.values.copy())
        more["scale_mode"] = cache.scales.mode
    found: bytes = save(tensors, more | {"checksum": _checksum(tensors, more)})
    return found


def _checksum(tensors: Mapping[str, Tensor], said: Mapping[str, str]) -> str:
    """xxh3-128 of all that a file holds: what it says, and name, shape, dtype and bytes of every tensor. Hexadecimal."""
    parts = [json.dumps(sorted(said.items())).encode()]
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        parts.append(f"{name} {values.dtype} {list(values.shape)} ".encode())
        parts.append(digest(values.reshape(-1).view(torch.uint8).numpy().tobytes()))
    return digest(b"".join(parts)).hex()


def read(path: Path) -> SpooledCache:
    """Read a file back.

    Raises:
        DataError: it is no such file, or a damaged one.
        StorageError: it cannot be read.
    """
    try:
        if path.stat().st_size > MAX_FILE:
            raise DataError(f"{path} is too large to be the cache of one prompt")
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        tensors, said = load(data), _metadata(data)
        if said.pop("checksum") != _checksum(tensors, said):
            raise ValueError("its checksum differs, so it was changed after it was saved")
        return _parse(tensors, said)
    except (
        SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        struct.error,
        DataError,
    ) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise DataError(f"{path} is no saved cache: {reason}") from error


def _metadata(data: bytes) -> dict[str, str]:
    """The header's own entries, which the library reads from a path only."""
    (size,) = struct.unpack_from("<Q", data)
    if size > _MAX_HEADER:
        raise ValueError("its header is too large")
    found: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return found


def _parse(tensors: dict[str, Tensor], said: dict[str, str]) -> SpooledCache:
    ids, name = tensors.pop("token_ids"), said["format"]
    if name not in FORMATS:
        raise ValueError(f"its format {name!r:.40} is not known")
    fmt, scales = number_format(name), None
    if fmt.coarse:
        scales = _scales(tensors.pop("scales"), said["scale_mode"])
    count = len(tensors) // 2
    layers = [(tensors.pop(f"layers.{n}.key"), tensors.pop(f"layers.{n}.value")) for n in range(count)]
    if tensors or not 1 <= count <= MAX_LAYERS or ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
        raise ValueError("it has other tensors than a cache")
    shape = layers[0][0].shape
    if len(shape) != 3 or shape[1] != len(ids) or any(
        t.shape != shape or t.dtype != fmt.dtype for pair in layers for t in pair
    ):  # fmt: skip
        raise ValueError(f"its tensors are not all {fmt.dtype} [heads, {len(ids)} tokens, head_dim]")
    if scales is not None and scales.values.shape != (count, 2, shape[0]):
        raise ValueError("its scales are for another shape")
    return SpooledCache(ids, layers, name, scales)


def _scales(values: Tensor, mode: str) -> CacheScales:
    if values.dtype != torch.float32 or values.dim() != 3 or values.shape[1] != 2 or mode not in SCALE_MODES:
        raise ValueError("its scales are malformed")
    return CacheScales.from_bytes(CacheScales(mode, values.numpy().astype(np.float32)).to_bytes())
