"""Recompression: a new generation of all prompts that a store keeps, verified, and only then shown to readers.

    retell the prompts -> calibrate -> hide the new generation -> encode -> verify all of it -> point readers to it

It is the main job (pipeline/run.py) on prompts from the store. Whatever step it is interrupted at, a rerun finds what is stored,
computes the rest, verifies everything again and moves the pointer. The old generation stays where it is; jobs/gc.py deletes it when
its grace period has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

from codec.errors import UserError
from pipeline.calibration import find_profile
from pipeline.current import point, point_first, read_pointers, stage
from pipeline.lease import at_work, refuse_deleting
from pipeline.model_source import ModelSource, resolve_model
from pipeline.options import DEFAULT_FP8_SCALE, FP8_FORMATS, Options
from pipeline.paths import index_prefix
from pipeline.prepare import prepare
from pipeline.quota import Allowance
from pipeline.recode import check_same_bits, of_one_scaling, prepare_recode, read_again, recode_job
from pipeline.recording import Ran, recorded
from pipeline.replaced import Replaced, find_replaced
from pipeline.report import say
from pipeline.retell import TOKEN_IDS, Retelling
from pipeline.run import Consoles, carry_out
from pipeline.store import Store
from pipeline.work import Job

Hook = Callable[[Job], None]
UNSET = Options("", "", "")  # what an option is that nobody gave


@dataclass(frozen=True)
class RecompressOptions:
    """Everything `jobs/recompress.py` can be told; the names are those of its command line. None: as the old generation was made."""

    store: str
    model: str | None = None
    lora: str | None = None
    source: str | None = None
    name: str | None = None
    prompts: str | None = None
    codec_only: bool = False
    predictor: str | None = None
    loop: str | None = None
    coder: str | None = None
    window: int | None = None
    cache_dtype: str | None = None
    fp8_scale: str | None = None
    chunk_tokens: int | None = None
    calibration: str | None = None
    actors: int | None = None
    device: str = UNSET.device
    gpus_per_actor: float | None = None
    max_tokens: int | None = None
    skip_bad: bool = False
    salt_env: tuple[str, ...] = ()
    skip_tenants: bool = False
    token_ids: str | None = None
    dry_run: bool = False
    shared_fs: bool = False
    report: str | None = None
    max_store_bytes: str | None = None

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        if self.model is None and not self.codec_only:
            raise UserError("pass --model NEW, or --codec-only to keep the target and change how it is stored")
        if self.token_ids is not None and self.token_ids not in TOKEN_IDS:
            raise UserError(f"--token-ids {self.token_ids!r} is not known; choose {' or '.join(TOKEN_IDS)}")
        if self.prompts is not None and len(self.salt_env) > 1:
            raise UserError("--prompts goes with one --salt-env only; give its records a field salt instead")
        if self.codec_only:
            taken = {
                "--prompts": self.prompts, "--salt-env": self.salt_env, "--chunk-tokens": self.chunk_tokens,
                "--max-tokens": self.max_tokens, "--token-ids": self.token_ids, "--fp8-scale": self.fp8_scale,
                "--calibration": self.calibration,
            }  # fmt: skip
            for flag, value in taken.items():
                if value:
                    raise UserError(
                        f"{flag} does not go with --codec-only, which changes neither prompts nor their caches"
                    )

    @property
    def rung_given(self) -> bool:
        """Whether anything was asked for that another generation than the one in use could have."""
        given = self.predictor, self.loop, self.coder, self.window, self.cache_dtype, self.fp8_scale, self.chunk_tokens
        return any(value is not None for value in given)

    def job_options(self, old: Replaced) -> Options:
        """The main job's: what was not given is as the old generation was made. Raises UserError."""
        made = old.made
        predictor = self.predictor or made.kind
        fmt = self.cache_dtype or made.cache_format
        if self.codec_only and fmt != made.cache_format:
            raise UserError(
                f"--cache-dtype {fmt} does not go with --codec-only, which changes no caches: those of the target "
                f"{old.target.hex()[:16]} are in {made.cache_format}"
            )
        scale = self.fp8_scale or ((made.scale_mode or DEFAULT_FP8_SCALE) if fmt in FP8_FORMATS else None)
        options = Options(
            model=self.model or "",
            corpus=self.prompts or "",
            store=self.store,
            lora=self.lora,
            predictor=predictor,
            loop=self.loop or made.loop,
            coder=self.coder or made.coder,
            window=self.window or (made.window if predictor == made.kind else None),
            cache_dtype=fmt,
            fp8_scale=scale,
            chunk_tokens=self.chunk_tokens or made.chunk_tokens,
            calibration=self.calibration,
            actors=self.actors,
            device=self.device,
            gpus_per_actor=self.gpus_per_actor,
            max_tokens=self.max_tokens,
            skip_bad=self.skip_bad,
            salt_env=self.salt_env[0] if self.prompts and self.salt_env else None,
            dry_run=self.dry_run,
            shared_fs=self.shared_fs,
            report=self.report,
            max_store_bytes=self.max_store_bytes,
        )
        options.check()
        return options


def recompress(options: RecompressOptions, consoles: Consoles) -> int:
    """Do what the options say: 0 if readers follow the generation that was asked for, 1 if verification found something.

    Raises UserError, DataError, StorageError; readers then follow what they followed before.
    """
    options.check()
    store = Store.open(options.store, create=False)
    model = resolve_model(options.model, options.lora) if options.model is not None else None
    name = options.name or (model.name if model is not None else None)
    old = find_replaced(store, name, options.source, options.cache_dtype)
    wanted = options.job_options(old)
    if options.codec_only:
        old, others = of_one_scaling(store, old)
        if others:
            say(consoles.notes, f"{others} generations of the same target with other FP8 scales stay as they are")
    work = _Recode(store, old, wanted, model) if options.codec_only else _Retell(old, wanted, options)
    shown = old.seen is not None or options.name is None  # a new name has to be pointed somewhere
    if shown and work.unchanged(options.rung_given):
        say(consoles.result, f"unchanged: readers of {old.name} have this generation of target {old.target.hex()[:16]}")
        return 0
    lease: AbstractContextManager[None] = nullcontext() if options.dry_run else at_work(store)
    with lease, recorded("recompress", work.job, wanted, asdict(options)) as record:
        if not options.dry_run:
            refuse_deleting(store)  # it may be about to delete what this goes back to
        ran = work.run(consoles, lambda job: _hide(store, old, job))
        if ran.status == 0 and not options.dry_run:
            _show(store, old, ran.job, consoles)
        record(ran)
    return ran.status


def _hide(store: Store, old: Replaced, job: Job) -> None:
    """Hide the new generation, and see to it that readers who ask for the name know which one they are to follow."""
    main = old.generations[0]
    for name in sorted(main.models):  # who reads it by another name goes on doing so
        point_first(store, name, old.cache_format, (main.target, main.profile))
    if next(store.list(index_prefix(job.target, job.profile)), None) is None:  # what readers have been shown stays
        stage(store, old.name, job.cache_format, (job.target, job.profile))


def _show(store: Store, old: Replaced, job: Job, consoles: Consoles) -> None:
    """Move the pointer. What readers of other names or in other formats follow is not replaced."""
    same = job.cache_format == old.cache_format and not old.shared
    seen = set(old.pairs)
    if job.cache_format != old.cache_format or (old.seen is not None and old.seen.pair not in seen):
        now = read_pointers(store).current(old.name, job.cache_format)
        seen |= set() if now is None else {now.pair}
    point(store, old.name, job.cache_format, (job.target, job.profile), replaces=old.pairs if same else (), seen=seen)
    say(
        consoles.result,
        f"readers of {old.name} now follow target {job.target.hex()[:16]}, profile {job.profile.hex()[:16]}"
        + ("; jobs/gc.py deletes what it replaces after its grace period" if same else ""),
    )


class _Retell:
    """Another target: the prompts are tokenised and computed again."""

    def __init__(self, old: Replaced, wanted: Options, options: RecompressOptions) -> None:
        self._old = old
        self._retelling: Retelling | None = None
        if options.prompts is None:
            tenants = options.salt_env, options.skip_tenants
            self._retelling = Retelling(old.target, *tenants, options.token_ids)
        self._prepared = replace(prepare(wanted, self._retelling), whole=True)
        self.job = self._prepared.job

    def unchanged(self, rung_given: bool) -> bool:
        """Whether readers have this very generation, and nothing but it."""
        if (
            self.job.target != self._old.target or self._retelling is None
        ):  # prompts that are given have to be looked at
            return False
        found = find_profile(self.job) if self.job.scaled else None
        pair = None if found is None else (found.target, found.profile)
        return not rung_given or pair == (self._old.target, self._old.generations[0].profile)

    def run(self, consoles: Consoles, before_encode: Hook) -> Ran:
        """Run the job until no prompt has come to the old generation meanwhile."""
        while True:
            parts = self._parts()
            ran = carry_out(self._prepared, consoles, before_encode)
            if ran.status or self._prepared.options.dry_run or self._parts() <= parts:
                return ran
            say(consoles.notes, "prompts were added to the old generation meanwhile; going on with these")

    def _parts(self) -> set[str]:
        return set() if self._retelling is None else set(self._retelling.parts(self.job.store))


class _Recode:
    """The same target: stored chunks are decoded and encoded again."""

    def __init__(self, store: Store, old: Replaced, wanted: Options, model: ModelSource | None) -> None:
        self._store, self._old, self._wanted, self._model = store, old, wanted, model
        self._allowance = Allowance(store, wanted.max_store_bytes)
        self.job = recode_job(store, old, wanted, model, self._allowance)

    def unchanged(self, rung_given: bool) -> bool:
        """Whether the rung is the one in use, and there is no other generation beside it."""
        return self._old.pairs == {(self.job.target, self.job.profile)}

    def run(self, consoles: Consoles, before_encode: Hook) -> Ran:
        """Run the job on every generation that is replaced, until no chunk has come to them meanwhile."""
        others = [gen for gen in self._old.generations if gen.profile != self.job.profile]
        total = Ran(0, self.job, {})
        while True:
            left: set[bytes] = set()
            for prepared in prepare_recode(self.job, others, self._wanted, self._model, left, self._allowance):
                total = total.plus(carry_out(prepared, consoles, before_encode))
                if total.status:
                    return total
            if self._wanted.dry_run:
                return total
            check_same_bits(total.job, others, left)
            now = [read_again(self._store, gen) for gen in others]
            if all(new.rows.keys() <= old.rows.keys() for new, old in zip(now, others, strict=True)):
                return total
            say(consoles.notes, "chunks were added to the old generation meanwhile; going on with these")
            others = now
