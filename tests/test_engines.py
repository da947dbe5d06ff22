"""Engines without an engine: pages of any layout, what a scheduler asks, what a worker loads and saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch

from codec.errors import DataError, StorageError, UserError
from codec.formats import bits
from codec.keys import engine_target
from codec.scales import CacheScales
from pipeline.engines.loader import Loader, PagedCache, PagedLayer
from pipeline.engines.lookup import Load, Lookup, Save, targets
from pipeline.engines.pages import PageLayout
from pipeline.engines.spool import Spool, SpooledCache, pack, read
from pipeline.engines.vllm_sides import Scheduler, Step, Worker, cache_format, check, options
from pipeline.restoration.restorer import Workshop
from tests.stored import CHUNK, Kept, same, tokens_of

BLOCK, HEADS, DIM = 8, 2, 16
PROMPT = tokens_of(1, 3 * CHUNK + 9)
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def kernel(transposed: bool, pairs: bool = False, swapped: bool = False) -> Kernel:
    """Writes into [blocks, heads, block, 2 · dim]: K then V of each token; or K transposed, then V; or V's pairs interleaved."""

    def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        stored = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
        flat = bits(stored).view(len(cache), HEADS, -1)
        for token, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, BLOCK)
            k, v = (bits(t[token].to(stored.dtype)) for t in (key, value))
            if swapped:
                k = k.flip(0)
            if transposed:
                flat[block, :, at : BLOCK * DIM : BLOCK] = k
            else:
                flat[block, :, at * DIM : (at + 1) * DIM] = k
            order = torch.arange(DIM).view(2, -1).T.reshape(-1) if pairs else torch.arange(DIM)
            flat[block, :, BLOCK * DIM + at * DIM : BLOCK * DIM + (at + 1) * DIM] = v[:, order]

    return write


def cache_of(dtype: torch.dtype, blocks: int = 24) -> torch.Tensor:
    return torch.zeros(blocks, HEADS, BLOCK, 2 * DIM, dtype=dtype)


def random_pair(tokens: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bit patterns, NaNs and infinities too."""
    fill = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (2, HEADS, tokens, DIM * dtype.itemsize), dtype=torch.uint8, generator=fill)
    return raw[0].view(dtype), raw[1].view(dtype)


# ---------------------------------------------------------------- pages
@pytest.mark.parametrize("write", [kernel(False), kernel(True), kernel(True, pairs=True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_any_layout_is_found_and_bits_go_in_and_out(write: Kernel, dtype: torch.dtype) -> None:
    stored = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    cache = cache_of(dtype)
    layout = PageLayout.find(write, cache, stored, torch.bfloat16)
    assert not cache.any()
    pair, blocks = random_pair(21, stored, 3), [5, 2, 19, 7]
    layout.put(cache, blocks, 3, pair)
    assert same([layout.take(cache, blocks, 3, 21, stored)], [pair])
    assert {int(b) for b in bits(cache).view(len(cache), -1).any(1).nonzero()} <= set(blocks)
    # The engine's own kernel puts the same numbers into the same places.
    numbers = torch.randint(1, 9, (2, 16, HEADS, DIM)).to(torch.bfloat16)
    slots = torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(16)])
    write(numbers[0], numbers[1], cache, slots)
    taken = layout.take(cache, blocks, 0, 16, stored)
    assert torch.equal(taken[0].float(), numbers[0].transpose(0, 1).float())
    assert torch.equal(taken[1].float(), numbers[1].transpose(0, 1).float())


def test_a_cache_that_is_not_laid_out_a_value_a_place_is_refused() -> None:
    def forgets(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        kernel(False)(key, key, cache, slots)
        cache[:, :, 0] = 0

    for write in (forgets, kernel(False, swapped=True)):
        with pytest.raises(UserError, match="each value once"):
            PageLayout.find(write, cache_of(torch.bfloat16), torch.bfloat16, torch.bfloat16)
    with pytest.raises(UserError, match="kind that is not known"):
        PageLayout.find(kernel(False), torch.zeros(4, 8, 3), torch.float32, torch.float32)


# ---------------------------------------------------------------- a store and an engine beside it
@pytest.fixture(scope="module")
def kept(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    found = Kept(tiny_model, tmp_path_factory.mktemp("engines") / "store", kind="linear")
    found.put({"prompt": PROMPT})
    return found


def paged(kept: Kept, *, layers: int = 3, scales: tuple[float, float] = (1.0, 1.0)) -> PagedCache:
    dtype = kept.target.format.dtype
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    layout = PageLayout.find(kernel(True), cache_of(raw), dtype, torch.bfloat16)
    return PagedCache([PagedLayer(cache_of(raw), layout, scales) for _ in range(layers)], kept.target.cache_format)


def lookup_of(kept: Kept, **more: Any) -> Lookup:
    return Lookup(kept.store, targets(kept.job.model, kept.target.cache_format, "vllm", plain=True), BLOCK, **more)


def load_of(kept: Kept, first: int = 0) -> Load:
    lookup = lookup_of(kept)
    tokens = lookup.matched("r", PROMPT, first)
    found = lookup.allocated("r", PROMPT, list(range(3, 20)), tokens)
    assert found is not None
    return found


def test_a_scheduler_is_told_of_whole_blocks_and_one_token_is_left(kept: Kept) -> None:
    lookup = lookup_of(kept)
    stored = (len(PROMPT) - 1) // BLOCK * BLOCK
    assert lookup.matched("a", PROMPT, 0) == stored
    assert lookup.matched("b", PROMPT, 2 * BLOCK) == stored - 2 * BLOCK
    assert lookup.matched("c", PROMPT[: 2 * CHUNK], 0) == 2 * CHUNK - BLOCK  # all of it is stored
    assert lookup.matched("d", PROMPT[: 2 * CHUNK] + tokens_of(5, 50), 0) == 2 * CHUNK
    assert lookup.matched("e", tokens_of(6, 200), 0) == 0
    assert lookup.matched("f", PROMPT, 0, "another tenant") == 0
    assert not lookup.stored(PROMPT)  # not by the engine
    load = lookup.allocated("b", PROMPT, range(40), stored - 2 * BLOCK)
    assert load is not None and (load.first, load.end) == (2 * BLOCK, stored)
    assert lookup.matched("b", PROMPT, 0) == 0  # it was given once
    assert lookup.allocated("b", PROMPT, range(40), 0) is None
    lookup.finished("b")
    assert lookup.matched("b", PROMPT, 0) == stored


def test_what_could_not_be_loaded_is_not_asked_for_again(kept: Kept) -> None:
    lookup = lookup_of(kept)
    tokens = lookup.matched("a", PROMPT, 0)
    blocks = list(range(50, 70))
    assert lookup.allocated("a", PROMPT, blocks, tokens)
    lookup.failed(set(blocks[CHUNK // BLOCK + 1 :]))  # in the middle of the second chunk
    lookup.loaded({"a"})
    assert lookup.matched("b", PROMPT, 0) == CHUNK


@pytest.mark.parametrize("first", [0, 5 * BLOCK])
def test_a_worker_fills_pages_with_the_stored_bits(kept: Kept, first: int) -> None:
    cache, load = paged(kept), load_of(kept, first)
    loader = Loader(Workshop(kept.store), cache)
    loader.load(load)
    assert loader.done(60) == {"r"} and loader.failed() == set() and loader.done() == set()
    loader.close()
    taken = cache.take(Save(load.ids[: load.end], load.blocks)).layers
    wanted = [(k[:, first : load.end], v[:, first : load.end]) for k, v in kept.truth(PROMPT)]
    assert same([(k[:, first:], v[:, first:]) for k, v in taken], wanted)
    assert not first or not any(k[:, :first].any() or v[:, :first].any() for k, v in taken)


def test_damage_is_reported_by_its_blocks(kept: Kept, tmp_path: Path) -> None:
    cache, load = paged(kept), load_of(kept)
    blob = kept.blob(PROMPT, 1)
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-20] + bytes(20))
    try:
        loader = Loader(Workshop(kept.store), cache)
        loader.load(load)
        assert loader.done(60) == {"r"}
        assert loader.failed() == set(load.blocks[CHUNK // BLOCK : load.end // BLOCK])
        assert loader.failed() == set()
        loader.close()
    finally:
        blob.write_bytes(whole)
    first = cache.take(Save(load.ids[:CHUNK], load.blocks)).layers
    assert same(first, [(k[:, :CHUNK], v[:, :CHUNK]) for k, v in kept.truth(PROMPT)])
    rest = cache.take(Save(load.ids[: load.end], load.blocks)).layers
    assert not any(k[:, CHUNK:].any() or v[:, CHUNK:].any() for k, v in rest)


def test_an_engine_of_another_shape_gets_nothing(kept: Kept) -> None:
    load = load_of(kept)
    loader = Loader(Workshop(kept.store), paged(kept, layers=2))
    assert loader.fill(load) == load.first
    loader.close()


def test_fp8_pages_need_the_scales_that_were_stored(tiny_model: Path, tmp_path: Path) -> None:
    kept = Kept(tiny_model, tmp_path / "store", kind="static", cache="fp8_e4m3", mode="none")
    kept.put({"prompt": PROMPT})
    load, cache = load_of(kept), paged(kept)
    loader = Loader(Workshop(kept.store), cache)
    assert loader.fill(load) == load.end
    taken = cache.take(Save(load.ids[: load.end], load.blocks)).layers
    assert same(taken, [(k[:, : load.end], v[:, : load.end]) for k, v in kept.truth(PROMPT)])
    other = Loader(Workshop(kept.store), paged(kept, scales=(0.5, 1.0)))
    assert other.fill(load) == load.first


# ---------------------------------------------------------------- saved caches
def test_a_spool_holds_each_prompt_once_and_up_to_its_limit(kept: Kept, tmp_path: Path) -> None:
    truth = kept.truth(PROMPT)
    cache = SpooledCache(torch.tensor(PROMPT), truth, "bf16")
    spool = Spool(tmp_path, limit=len(pack(cache)) + 100)
    path = spool.put(cache)
    assert spool.put(cache) == path and spool.files() == [path]
    back = read(path)
    assert back.ids.tolist() == PROMPT and same(back.layers, truth) and back.scales is None
    with pytest.raises(StorageError, match="limit"):
        spool.put(SpooledCache(torch.tensor(PROMPT[:-1]), truth, "bf16"))
    with pytest.raises(UserError, match="does not exist"):
        Spool(tmp_path / "nowhere")


def test_what_is_no_saved_cache_is_refused_in_a_sentence(kept: Kept, tmp_path: Path) -> None:
    truth, ids, path = kept.truth(PROMPT), torch.tensor(PROMPT), tmp_path / "x.safetensors"
    scales = CacheScales("none", np.ones((2, 2, HEADS), np.float32))
    eight = [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in truth]
    good = pack(SpooledCache(ids, truth, "bf16"))
    for data, said in (
        (b"", "no saved cache"),
        (good[:-1], "no saved cache"),
        (b"\xff" * 8 + good[8:], "no saved cache"),
        (pack(SpooledCache(ids, truth, "fp16")), "not all"),
        (pack(SpooledCache(ids, truth, "int3")), "format"),
        (pack(SpooledCache(ids[:-1], truth, "bf16")), "not all"),
        (pack(SpooledCache(ids, truth[:0], "bf16")), "other tensors"),
        (pack(SpooledCache(ids.float(), truth, "bf16")), "other tensors"),
        (pack(SpooledCache(ids, eight, "fp8_e4m3")), "lacks 'scales'"),
        (pack(SpooledCache(ids, eight, "fp8_e4m3", scales)), "another shape"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=said):
            read(path)
    with pytest.raises(StorageError):
        read(tmp_path / "none")


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3"])
def test_one_changed_bit_anywhere_in_a_saved_cache_is_noticed(kept: Kept, tmp_path: Path, kind: str) -> None:
    truth, ids, path = kept.truth(PROMPT), torch.tensor(PROMPT), tmp_path / "x.safetensors"
    scales = None
    if kind != "bf16":
        truth = [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in truth]
        scales = CacheScales.none(len(truth), HEADS)
    good = pack(SpooledCache(ids, truth, kind, scales))
    path.write_bytes(good)
    assert same(read(path).layers, truth)
    begin = 8 + int.from_bytes(good[:8], "little")
    places = [begin, len(good) - 1, *np.random.default_rng(5).integers(begin, len(good), 60).tolist()]
    for place in [*places, *range(0, begin, 7)]:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(DataError, match="no saved cache"):
            read(path)


# ---------------------------------------------------------------- what vLLM says and asks
def config_of(kept: Kept, **extra: Any) -> Any:
    model = Namespace(model=kept.job.model.path, dtype=torch.bfloat16, quantization=None, hf_overrides={})
    return Namespace(
        kv_transfer_config=Namespace(
            kv_connector_extra_config={"store": kept.store.uri} | extra, kv_load_failure_policy="recompute"
        ),
        model_config=model,
        cache_config=Namespace(cache_dtype="auto", block_size=BLOCK),
        parallel_config=Namespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )


def request_of(name: str, ids: list[int], **more: Any) -> Any:
    fields = {"cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None}
    return Namespace(request_id=name, prompt_token_ids=ids, **(fields | more))


def scheduled(new: list[Any] = [], again: dict[str, tuple[list[int], int]] = {}, **tokens: int) -> Any:  # noqa: B006
    cached = Namespace(
        req_ids=list(again),
        new_block_ids=[(blocks,) for blocks, _ in again.values()],
        num_computed_tokens=[count for _, count in again.values()],
        resumed_req_ids=set(),
    )
    return Namespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )  # fmt: skip


def new_of(request: Any, blocks: list[int], computed: int) -> Any:
    return Namespace(**vars(request), req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=computed)


def test_a_scheduler_loads_then_saves_what_the_engine_has_not_stored(kept: Kept, tmp_path: Path) -> None:
    only_own = Scheduler(config_of(kept, spool=str(tmp_path), refresh=1))
    assert only_own.matched(request_of("r", PROMPT), 0) == 0, (
        "what follows from others' bits is not to be saved as the engine's"
    )
    side = Scheduler(config_of(kept, spool=str(tmp_path), plain=True, refresh=1))
    request = request_of("r", PROMPT)
    tokens = side.matched(request, 0)
    side.allocated(request, range(40), tokens)
    step = side.step(scheduled())
    assert step.idle and [load.end for load in step.loads] == [tokens] and not step.saves
    side.loaded(set(), {"r"})
    step = side.step(scheduled([new_of(request, [0, 1], 50)], r=4))  # as if only some of it had been right
    assert not step.loads and not step.saves and not step.idle
    step = side.step(scheduled(again={"r": ([2, 3], 54)}, r=len(PROMPT) - 54))
    assert [(save.ids.tolist(), save.blocks) for save in step.saves] == [(PROMPT, (0, 1, 2, 3))]
    side.finished("r")


def test_a_worker_fills_the_layers_that_are_registered_and_saves_them(kept: Kept, tmp_path: Path) -> None:
    def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        assert layer._k_scale_float == layer._v_scale_float == 1.0 and layer.isa == "vec"
        kernel(True)(key, value, cache, slots)

    config = config_of(kept, spool=str(tmp_path))
    layer = Namespace(impl=Namespace(do_kv_cache_update=update), isa="vec", _k_scale_float=0.5, _v_scale_float=2.0)
    names = [f"model.layers.{n}.attn" for n in (2, 0, 1)]
    config.compilation_config = Namespace(static_forward_context=dict.fromkeys(names, layer))
    side = Worker(config)
    side.close()
    caches = {name: cache_of(torch.bfloat16) for name in names}
    side.register(caches)
    load = load_of(kept)
    side.load(Step([load]))
    ended: set[str] = set()
    while not ended:
        ended = side.done(Step(idle=True))
    assert ended == {"r"} and side.failed() == set()
    side.save(Step(saves=[Save(load.ids[: load.end], load.blocks)]))
    side.close()
    (path,) = Spool(tmp_path).files()
    assert same(read(path).layers, [(k[:, : load.end], v[:, : load.end]) for k, v in kept.truth(PROMPT)])
    config.cache_config.block_size = 2 * BLOCK
    with pytest.raises(UserError, match="other blocks"):
        side.register(caches)
    with pytest.raises(UserError, match="kind that is not known"):
        side.register({"model.layers.0.sub.1": caches[names[0]]})


def test_prompts_that_are_more_than_their_tokens_are_neither_loaded_nor_saved(kept: Kept, tmp_path: Path) -> None:
    side = Scheduler(config_of(kept, spool=str(tmp_path)))
    for number, more in enumerate(({"lora_request": "x"}, {"mm_features": ["x"]}, {"prompt_embeds": "x"})):
        request = request_of(str(number), PROMPT, **more)
        assert side.matched(request, 0) == 0
        assert not side.step(scheduled([new_of(request, [0], 0)], **{str(number): len(PROMPT)})).saves
    salted = request_of("s", PROMPT, cache_salt="tenant")
    assert side.matched(salted, 0) == 0
    assert not side.step(scheduled([new_of(salted, [0], 0)], s=len(PROMPT))).saves


def test_wrong_options_and_engines_are_refused(kept: Kept) -> None:
    groups = Namespace(kv_cache_groups=[0])
    check(config_of(kept), groups)
    assert cache_format(config_of(kept)) == "bf16"
    for extra, said in (
        ({"stor": "x"}, "unknown entry 'stor'"),
        ({"plain": "no"}, "no bool"),
        ({"store": ""}, "no store"),
    ):
        with pytest.raises(UserError, match=said):
            options(config_of(kept, **extra))
    with pytest.raises(UserError, match="several kinds"):
        check(config_of(kept), Namespace(kv_cache_groups=[0, 1]))
    sharded, other, odd = config_of(kept), config_of(kept), config_of(kept)
    sharded.parallel_config.tensor_parallel_size = 2
    other.model_config.hf_overrides = {"rope_theta": 1}
    odd.cache_config.cache_dtype = "nvfp4"
    for config, said in ((sharded, "sharded"), (other, "another model"), (odd, "not stored")):
        with pytest.raises(UserError, match=said):
            check(config, groups)


def test_an_engines_target_is_another_one(kept: Kept) -> None:
    own = kept.job.target
    assert len({own, engine_target(own, "vllm"), engine_target(own, "vllm fp8"), engine_target(bytes(32), "vllm")}) == 4
