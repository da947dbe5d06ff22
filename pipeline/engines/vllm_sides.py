"""Both sides of vLLM's connector, without importing vLLM: what is asked of a configuration, a scheduler's step and a layer.

Options (kv_connector_extra_config): store (a URI); salt_env (name of the variable with the tenant's salt; a request's cache_salt
goes before it); plain (false: only caches that vLLM computed, not the main job's;
default: true without a spool, as what follows from other bits than vLLM's must not be saved as vLLM's); spool (a folder for caches that
jobs/import_caches.py compresses), spool_bytes (its limit); device (where predictors compute); refresh (seconds between looks).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from codec.errors import UserError
from codec.formats import number_format
from pipeline.engines.loader import Loader, PagedCache, PagedLayer
from pipeline.engines.lookup import REFRESH_SECONDS, Load, Lookup, Save, targets
from pipeline.engines.pages import PageLayout, Write
from pipeline.engines.spool import Spool
from pipeline.model_source import RUN_DTYPES, resolve_model, run_format
from pipeline.options import read_salt
from pipeline.restoration.catalogue import token_array
from pipeline.restoration.restorer import Workshop
from pipeline.store import Store

ENGINE = "vllm"
OPTIONS = {
    "store": str,
    "salt_env": str,
    "plain": bool,
    "spool": str,
    "spool_bytes": int,
    "device": str,
    "refresh": float,
}
FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
IDLE_SECONDS = 0.02  # what a step with nothing to compute may wait for a load
log = logging.getLogger("kv_store")


@dataclass
class Step:
    """What the scheduler tells the worker of one step. idle: nothing is computed in it."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False


@dataclass
class _Watched:
    """A prompt that is to be saved when it is computed."""

    ids: list[int]
    blocks: list[int]


class Scheduler:
    """What is stored of each request, and which prompts are to be saved."""

    def __init__(self, config: Any) -> None:
        self._lookup = _lookup(config)
        self._saving = bool(options(config).get("spool"))
        self._step = Step()
        self._watched: dict[str, _Watched] = {}
        self._salted: set[str] = set()  # requests with a salt of their own, which a spool must not know

    def matched(self, request: Any, computed: int) -> int:
        """How many tokens beyond the computed ones can be loaded."""
        if request.cache_salt:
            self._salted.add(request.request_id)
        if not _plain_text(request):
            return 0
        return self._lookup.matched(request.request_id, request.prompt_token_ids, computed, request.cache_salt)

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """There are blocks for so many of them."""
        load = self._lookup.allocated(request.request_id, request.prompt_token_ids or [], blocks, tokens)
        if load is not None:
            self._step.loads.append(load)

    def step(self, scheduled: Any) -> Step:
        """All that has come together since the last step, and what this one completes."""
        if self._saving:
            self._watch(scheduled)
        step, self._step = self._step, Step()
        step.idle = scheduled.total_num_scheduled_tokens == 0
        return step

    def loaded(self, failed: set[int], requests: set[str]) -> None:
        """Loads have come to an end; these blocks hold nothing right."""
        self._lookup.failed(failed)
        self._lookup.loaded(requests)

    def finished(self, request: str) -> None:
        """Nothing more comes of a request."""
        self._lookup.finished(request)
        self._watched.pop(request, None)
        self._salted.discard(request)

    def _watch(self, scheduled: Any) -> None:
        """Save each prompt in the step that computes its last token: its blocks are its own until then."""
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            ids = new.prompt_token_ids
            if _plain_text(new) and new.req_id not in self._salted and not self._lookup.stored(ids):
                self._watched[new.req_id] = _Watched(list(ids), list(new.block_ids[0]))
        again = scheduled.scheduled_cached_reqs
        for request, blocks, count in zip(again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True):
            computed[request] = count
            watched = self._watched.get(request)
            if watched is not None and blocks is not None:
                kept = [] if request in again.resumed_req_ids else watched.blocks
                watched.blocks = [*kept, *blocks[0]]
        for request, count in computed.items():
            watched = self._watched.get(request)
            if watched is not None and count + scheduled.num_scheduled_tokens[request] >= len(watched.ids):
                del self._watched[request]
                self._step.saves.append(Save(token_array(watched.ids), tuple(watched.blocks)))


class Worker:
    """The pages, what is loaded into them, and what is saved of them."""

    def __init__(self, config: Any, loader: type[Loader] = Loader) -> None:
        given = options(config)
        self._config, self._class = config, loader
        self._workshop = Workshop(Store.open(given["store"], create=False), given.get("device", "cpu"))
        self._spool = Spool(given["spool"], given.get("spool_bytes")) if given.get("spool") else None

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """The paged cache of every layer, by its name. UserError where they are none that can be filled: the engine does not start."""
        layers = self._config.compilation_config.static_forward_context
        named = sorted(caches, key=_layer_number)
        pages = _pages([layers[name] for name in named], [caches[name] for name in named], self._config)
        self._loader = self._class(self._workshop, pages, self._spool)

    def load(self, step: Step) -> None:
        """Begin the loads of a step."""
        for load in step.loads:
            self._loader.load(load)

    def save(self, step: Step) -> None:
        """Copy what a step has completed."""
        for save in step.saves:
            self._loader.save(save)

    def done(self, step: Step) -> set[str]:
        """Requests whose loads have ended."""
        return self._loader.done(IDLE_SECONDS if step.idle else 0.0)

    def failed(self) -> set[int]:
        """Blocks of theirs that hold nothing right."""
        return self._loader.failed()

    def close(self) -> None:
        """End the threads; there are none yet where the engine did not get so far."""
        if "_loader" in vars(self):
            self._loader.close()


# ---------------------------------------------------------------- pages
class _Unscaled:
    """An attention layer with scales of 1, for writing numbers as they are."""

    _k_scale_float = _v_scale_float = 1.0

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _pages(layers: Sequence[Any], caches: Sequence[Tensor], config: Any) -> PagedCache:
    """The engine's pages with their layout. UserError where they are none that can be filled."""
    if {cache.shape[2] for cache in caches} != {config.cache_config.block_size}:
        raise UserError("vLLM's paged cache has other blocks than its scheduler counts in")
    fmt = cache_format(config)
    with torch.inference_mode():
        layout = PageLayout.find(_writer(layers[0]), caches[0], number_format(fmt).dtype, config.model_config.dtype)
    scales = [(layer._k_scale_float, layer._v_scale_float) for layer in layers]
    return PagedCache([PagedLayer(c, layout, s) for c, s in zip(caches, scales, strict=True)], fmt)


def _writer(layer: Any) -> Write:
    plain = _Unscaled(layer)
    return lambda key, value, cache, slots: layer.impl.do_kv_cache_update(plain, key, value, cache, slots)


def _layer_number(name: str) -> int:
    found = re.findall(r"\d+", name)
    if len(found) != 1:
        raise UserError(f"vLLM's layer {name!r:.100} is of a kind that is not known here")
    return int(found[0])


# ---------------------------------------------------------------- configuration
def options(config: Any) -> dict[str, Any]:
    """The connector's options. UserError for one that is unknown or of another type."""
    given: dict[str, Any] = dict(config.kv_transfer_config.kv_connector_extra_config)
    for name, value in given.items():
        if name not in OPTIONS:
            raise UserError(
                f"kv_connector_extra_config has an unknown entry {name!r:.60}; known are {', '.join(OPTIONS)}"
            )
        kinds = (int, float) if OPTIONS[name] is float else OPTIONS[name]
        if value is not None and not isinstance(value, kinds):
            raise UserError(
                f"{name} in kv_connector_extra_config is {value!r:.60}, which is no {OPTIONS[name].__name__}"
            )
    if not given.get("store"):
        raise UserError("kv_connector_extra_config names no store; give its URI as 'store'")
    return {name: value for name, value in given.items() if value is not None}


def check(config: Any, kv_cache_config: Any) -> None:
    """Raise UserError for an engine that the connector does not work with."""
    options(config)
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise UserError("the model keeps several kinds of cache, and only plain K and V of every token are stored")
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise UserError("the connector does not work with a sharded engine yet; fetch spans with pipeline.restore")
    if getattr(config.model_config, "hf_overrides", None):
        raise UserError(
            "hf_overrides make another model of the same files, which is not told apart; put them into config.json"
        )
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        log.warning("kv_load_failure_policy is not 'recompute': a request whose stored prefix is damaged will fail")
    cache_format(config)


def cache_format(config: Any) -> str:
    """The number format of vLLM's cache, a name of codec.formats. UserError for one that is not stored."""
    asked, dtype = str(config.cache_config.cache_dtype), config.model_config.dtype
    if asked in FP8:
        return FP8[asked]
    found = [name for name, known in RUN_DTYPES.items() if known == dtype]
    if asked not in ("auto", str(dtype).removeprefix("torch.")) or not found:
        raise UserError(f"a cache in {asked} of a model in {dtype} is not stored; use kv_cache_dtype auto or fp8")
    return found[0]


def _lookup(config: Any) -> Lookup:
    given, model, fmt = options(config), config.model_config, cache_format(config)
    source = resolve_model(model.model)
    if RUN_DTYPES[run_format(source, fmt)] != model.dtype:
        raise UserError(
            f"the model {source.name!r} runs in {model.dtype} here, which is not the dtype that its FP8 caches are made in"
        )
    engine = f"{ENGINE} {model.quantization}" if model.quantization else ENGINE
    plain = given.get("plain", not given.get("spool")) and not model.quantization
    return Lookup(
        Store.open(given["store"], create=False),
        targets(source, fmt, engine, plain=plain),
        config.cache_config.block_size,
        salt=read_salt(given.get("salt_env")),
        refresh=given.get("refresh", REFRESH_SECONDS),
    )


def _plain_text(request: Any) -> bool:
    """Whether its cache is made by the weights and the token ids alone."""
    other = request.lora_request is not None or request.mm_features or request.prompt_embeds is not None
    return bool(request.prompt_token_ids) and not other
