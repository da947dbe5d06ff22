"""Compressors of bytes and numbers that others made, as far as they are installed (the extra `bench`), one thread each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from codec.formats import NumberFormat


@dataclass(frozen=True)
class Peer:
    """A compressor: bytes to bytes and back."""

    name: str
    encode: Callable[[bytes], bytes]
    decode: Callable[[bytes], bytes]


class Unfit(Exception):
    """A peer does not take this cache format."""


def general_peers(fmt: NumberFormat) -> tuple[list[Peer], dict[str, str]]:
    """(those that can be measured on this cache format, why the others cannot: by package)."""
    found: list[Peer] = []
    skipped: dict[str, str] = {}
    for package, make in (("zstandard", _zstd), ("blosc2", _blosc2), ("pcodec", _pcodec), ("zipnn", _zipnn)):
        try:
            found += make(importlib.import_module(package), fmt)
        except ImportError as error:
            skipped[package] = f"not installed ({error}); pip install '.[bench]'"
        except Unfit as error:
            skipped[package] = str(error)
    return found, skipped


def _zstd(zstandard: Any, fmt: NumberFormat) -> list[Peer]:
    peers = []
    for level in (1, 3):
        pack, unpack = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        peers.append(Peer(f"zstd {level}", pack.compress, unpack.decompress))
    if fmt.item_bytes > 1:
        pack, unpack = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
        peers.append(_planes("byte planes + zstd 3", fmt.item_bytes, pack.compress, unpack.decompress))
    return peers


def _planes(name: str, width: int, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]) -> Peer:
    """Bytes of equal significance together, each plane compressed by itself; behind 8 bytes of length each."""

    def encode(raw: bytes) -> bytes:
        planes = np.frombuffer(raw, np.uint8).reshape(-1, width).T
        packed = [pack(np.ascontiguousarray(plane).tobytes()) for plane in planes]
        return b"".join(len(p).to_bytes(8, "little") + p for p in packed)

    def decode(data: bytes) -> bytes:
        planes, at = [], 0
        for _ in range(width):
            size = int.from_bytes(data[at : at + 8], "little")
            planes.append(np.frombuffer(unpack(data[at + 8 : at + 8 + size]), np.uint8))
            at += 8 + size
        return np.stack(planes, 1).tobytes()

    return Peer(name, encode, decode)


def _blosc2(blosc2: Any, fmt: NumberFormat) -> list[Peer]:
    def peer(name: str, filters: list[Any]) -> Peer:
        given = {"typesize": fmt.item_bytes, "codec": blosc2.Codec.ZSTD, "clevel": 5, "filters": filters, "nthreads": 1}
        return Peer(name, lambda raw: blosc2.compress2(raw, **given), lambda data: blosc2.decompress2(data, nthreads=1))

    return [
        peer("blosc2 (shuffle, zstd 5)", [blosc2.Filter.SHUFFLE]),
        peer("blosc2 (bitshuffle, zstd 5)", [blosc2.Filter.BITSHUFFLE]),
    ]


def _pcodec(pcodec: Any, fmt: NumberFormat) -> list[Peer]:
    kinds: dict[str, Any] = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
    if fmt.name not in kinds:
        raise Unfit(f"does not take {fmt.name}")
    standalone = importlib.import_module("pcodec.standalone")
    config, kind = pcodec.ChunkConfig(), kinds[fmt.name]
    return [
        Peer(
            "pcodec (as uint16)" if kind is np.uint16 else "pcodec",
            lambda raw: standalone.simple_compress(np.frombuffer(raw, kind), config),
            lambda data: standalone.simple_decompress(data).tobytes(),
        )
    ]


def _zipnn(zipnn: Any, fmt: NumberFormat) -> list[Peer]:
    kinds = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if fmt.name not in kinds:
        raise Unfit(f"does not take {fmt.name}")
    coder = zipnn.ZipNN(bytearray_dtype=kinds[fmt.name], threads=1)
    # it changes what it is given in place: a copy
    return [
        Peer("ZipNN", lambda raw: bytes(coder.compress(bytearray(raw))), lambda data: bytes(coder.decompress(data)))
    ]
