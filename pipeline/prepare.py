"""All that can be known of a job before Ray is started and anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from codec.scales import CacheScales
from pipeline.cache_scales import find_scales
from pipeline.choice import choose
from pipeline.corpus import list_corpus
from pipeline.model_source import hf_config, load_config, resolve_cache_format, resolve_model, weight_files
from pipeline.options import Options, Verify, scale_mode
from pipeline.paths import MARKER
from pipeline.plan import Admitted
from pipeline.quota import Allowance
from pipeline.retell import Retelling
from pipeline.store import Store
from pipeline.target import check_cache, kv_shape
from pipeline.tenancy import Roots, tenant_name
from pipeline.work import Job


@dataclass(frozen=True)
class Prepared:
    """All that can be known before Ray is started and anything is written."""

    options: Options
    job: Job
    config: dict[str, Any]
    files: list[str]
    rope: str
    weight_bytes: int
    stored: bool  # whether there is a store yet
    allowance: Allowance  # what may be added to it
    notes: tuple[str, ...] = ()  # what the user should know before the job begins
    retelling: Retelling | None = None  # where prompts come from that are in no corpus
    admitted: Admitted | None = None  # prompts that are known already
    whole: bool = False  # whether chunks that an earlier run has stored are verified, too

    @property
    def roots(self) -> Roots:
        """What chains begin with; its own root holds the salt, and the scales as far as they are known."""
        job = self.job
        return Roots.make(
            target=job.target,
            cache_format=job.cache_format,
            chunk_tokens=job.chunk_tokens,
            rope_regime=self.rope,
            scales=job.scales,
            salt=self.options.salt(),
        )

    @property
    def root(self) -> bytes:
        """Key of the empty prefix of records without a salt of their own."""
        return self.roots.root


def prepare(options: Options, retelling: Retelling | None = None) -> Prepared:
    """Check the options, find corpus and model, open the store. With `retelling` prompts come from there, and not from a corpus."""
    options.check()
    files = list_corpus(options.corpus) if retelling is None else []
    if options.calibration is not None:
        list_corpus(options.calibration)
    model = resolve_model(options.model, options.lora)
    config = load_config(model)
    choice = choose(options.predictor, options.loop, options.window, config)
    check_cache(hf_config(model), model)
    cache_format = resolve_cache_format(model, options.cache_dtype)
    # A dry run writes nothing, so it must do without a store that is not there yet.
    store = Store(options.store)
    stored = not options.dry_run or store.exists(MARKER)
    if stored:
        store = Store.open(options.store, create=not options.dry_run)
    allowance = Allowance(store, options.max_store_bytes)
    if not options.dry_run:
        allowance.room()
    target = model.fingerprint(cache_format)  # reads all weights, so it comes last
    job = Job(
        store,
        model,
        target,
        cache_format,
        options.chunk_tokens,
        choice.kind,
        options.loop,
        tenant_name(options.salt()),
        verify=Verify.parse(options.verify),
        window=options.window,
        coder=options.coder,
        scale_mode=scale_mode(cache_format, options.fp8_scale),
    )
    if job.scale_mode == "none":
        layers, _, heads = kv_shape(config)
        job = replace(job, scales=CacheScales.none(layers, heads).to_bytes())
    elif job.scale_mode and stored:
        job = find_scales(job) or job
    weight_bytes = sum(file.stat().st_size for file in weight_files(model))
    return Prepared(
        options, job, config, files, choice.rope_regime, weight_bytes, stored, allowance, choice.notes, retelling
    )
