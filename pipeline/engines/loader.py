"""Stored prefixes decoded into an engine's pages, and pages copied into files: the side of an engine that computes.

Decoding takes longer than a step of the engine, so it is done in a thread while the engine serves others, and begins with the first
blobs while later ones are on their way. The engine uses a request's blocks only when all of them were reported as loaded, so half a
prefix is never seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from codec.errors import DataError, KVCodecError, StorageError
from codec.formats import number_format
from codec.scales import CacheScales
from pipeline.engines.lookup import Load, Save
from pipeline.engines.pages import PageLayout
from pipeline.engines.spool import Spool, SpooledCache
from pipeline.restoration.arriving import ArrivingPrefix, Part
from pipeline.restoration.prefix import Decoder
from pipeline.restoration.restorer import Workshop
from pipeline.secrets import without_secrets

log = logging.getLogger("kv_store")


@dataclass(frozen=True)
class PagedLayer:
    """One attention layer of the engine: its pages, and what an FP8 cache of it is multiplied by, K and V."""

    cache: Tensor
    layout: PageLayout
    scales: tuple[float, float]


class PagedCache:
    """All layers of an engine's cache, in their order."""

    def __init__(self, layers: Sequence[PagedLayer], cache_format: str) -> None:
        self.layers, self.format = list(layers), number_format(cache_format)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads, and values of a head."""
        return len(self.layers), self.layers[0].cache.shape[1], self.layers[0].layout.places.shape[2]

    @property
    def scales(self) -> CacheScales | None:
        """Those of an FP8 cache; None of any other."""
        if not self.format.coarse:
            return None
        values = np.array([layer.scales for layer in self.layers], np.float32)
        mode = "none" if bool((values == 1).all()) else "tensor"
        return CacheScales(mode, np.repeat(values[:, :, None], self.shape[1], 2))

    def take(self, save: Save) -> SpooledCache:
        """A copy of a prompt's cache."""
        blocks, tokens, dtype = save.blocks, len(save.ids), self.format.dtype
        pairs = [layer.layout.take(layer.cache, blocks, 0, tokens, dtype) for layer in self.layers]
        return SpooledCache(torch.from_numpy(save.ids.copy()), pairs, self.format.name, self.scales)

    def check(self, decoder: Decoder) -> None:
        """Raise DataError where a stored cache that this decodes is not one that the engine can go on with."""
        shape, scales = decoder.predictor.config, decoder.profile.scales
        wanted = (shape.layers, shape.kv_heads, shape.head_dim)
        if wanted != self.shape:
            raise DataError(f"the stored cache has {wanted} layers, heads and values, the engine's {self.shape}")
        own = self.scales
        if scales is not None and own is not None and not np.array_equal(scales.values, own.values):
            raise DataError(
                "the stored FP8 cache has other scales than the engine's; store it with --fp8-scale none, or save it from the engine"
            )


class Loader:
    """Loads that are under way, one after another in a thread, and saves behind them."""

    def __init__(self, workshop: Workshop, cache: PagedCache, spool: Spool | None = None) -> None:
        self._workshop, self._cache, self._spool = workshop, cache, spool
        self._threads = ThreadPoolExecutor(1, "kv-store-load")
        self._writing = ThreadPoolExecutor(1, "kv-store-save")
        self._loads: dict[Future[int], Load] = {}
        self._saves: list[Future[None]] = []
        self._failed: set[int] = set()

    def load(self, load: Load) -> None:
        """Begin to load."""
        self._loads[self._threads.submit(self.fill, load)] = load

    def done(self, seconds: float = 0.0) -> set[str]:
        """Requests whose loads have come to an end, well or not. seconds: how long to wait for one of them."""
        ended = wait(self._loads, seconds, "FIRST_COMPLETED").done if self._loads else set()
        requests = set()
        for future in ended:
            load = self._loads.pop(future)
            requests.add(load.request)
            right = future.result()
            if right < load.end:
                block = self._cache.layers[0].layout.block
                self._failed.update(load.blocks[right // block : load.end // block])
        return requests

    def failed(self) -> set[int]:
        """Blocks that could not be loaded, since this was asked last. Their requests are among those that `done` gave."""
        found, self._failed = self._failed, set()
        return found

    def fill(self, load: Load) -> int:
        """Decode into the pages while blobs arrive; how many tokens from the prompt's first one on are right, at most load.end."""
        right, reasons = load.first, list[str]()
        try:
            decoder = self._workshop.decoder(load.match.generation)
            self._cache.check(decoder)
            with (
                torch.inference_mode(),
                ArrivingPrefix(self._workshop.store, load.match, decoder, load.ids) as arriving,
            ):
                while load.first < arriving.reach and arriving.tokens < arriving.reach:
                    try:
                        for part in arriving.parts():
                            self._put(load, part)
                    except (DataError, StorageError) as error:  # it is shorter now
                        reasons.append(str(error))
                right = min(max(load.first, arriving.tokens), load.end)
        except KVCodecError as error:
            reasons.append(str(error))
        except Exception as error:  # the engine must hear of it and compute by itself, whatever it was
            reasons.append(without_secrets(f"{type(error).__name__}: {error}"))
        if right < load.end:
            said = "; ".join(reasons)
            log.error("a stored prefix of %d tokens cannot be restored beyond its first %d: %s", load.end, right, said)
        if right > load.first:
            log.info("restored tokens %d to %d of a prompt from the store", load.first, right)
        return right

    def _put(self, load: Load, part: Part) -> None:
        """Write what the request asks for of a part into its pages."""
        first = max(load.first, part.first_token)
        wanted = slice(first - part.first_token, max(0, load.end - part.first_token))
        layer, (key, value) = self._cache.layers[part.layer], part.pair
        layer.layout.put(layer.cache, load.blocks, first, (key[:, wanted], value[:, wanted]))

    def save(self, save: Save) -> None:
        """Copy a prompt's pages now, and write them into the spool in a thread."""
        if self._spool is None:
            return
        with torch.inference_mode():
            taken = self._cache.take(save)
        self._saves = [future for future in self._saves if not future.done()]
        self._saves.append(self._writing.submit(self._keep, taken))

    def _keep(self, taken: SpooledCache) -> None:
        assert self._spool is not None
        try:
            self._spool.put(taken)
        except KVCodecError as error:  # the engine goes on without
            log.error("a cache was not saved: %s", error)

    def close(self) -> None:
        """Let what is under way come to its end."""
        self._threads.shutdown(cancel_futures=True)
        self._writing.shutdown()
