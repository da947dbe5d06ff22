"""A loader with a witness: what each load put into vLLM's pages, and on demand one flipped bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from codec.formats import bits
from pipeline.engines.loader import Loader, PagedCache
from pipeline.engines.lookup import Load, Save

TRACE: list[dict[str, Any]] = []
FLIP: list[bool] = []  # not empty: flip a bit behind every load


def digest(cache: PagedCache, save: Save) -> str:
    """SHA-256 over the bits of all layers, K then V, of a prompt's first tokens."""
    found = hashlib.sha256()
    for pair in cache.take(save).layers:
        for values in pair:
            found.update(bits(values).numpy().tobytes())
    return found.hexdigest()


class TracedLoader(Loader):
    """Says what it did."""

    def fill(self, load: Load) -> int:
        """As it is, then read back."""
        right = super().fill(load)
        cache = self._cache
        if FLIP:
            with torch.inference_mode():
                page = bits(cache.layers[3].cache)[load.blocks[0]]
                page[0, 7, 11] ^= 1 << (6 if page.dtype == torch.uint8 else 13)  # a high bit of an exponent
        pages = digest(cache, Save(load.ids[:right], load.blocks))
        TRACE.append({"first": load.first, "end": load.end, "right": right, "pages": pages})
        return right
