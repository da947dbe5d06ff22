"""Recompression of the codec only: chunks of a stored generation are decoded and encoded again under another profile.

The store alone is enough, as long as it holds the new rung's predictor and profile, or the same calibration for another coder. Where
it does not, the target's files are needed once more, to calibrate; the bits that are encoded come from the store in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import codec
from codec.errors import DataError, UserError
from pipeline.calibration import find_profile, offer_profile
from pipeline.catalogue import Generation, Row, read_generation, stored_prompts
from pipeline.model_source import ModelSource, weight_files
from pipeline.options import CODERS, Options
from pipeline.paths import predictor_path
from pipeline.plan import Admitted, Prompt
from pipeline.prepare import Prepared
from pipeline.quota import Allowance
from pipeline.replaced import Replaced
from pipeline.store import Store
from pipeline.work import Decoded, Job, load_predictor, load_profile, put_profile


def prepare_recode(
    job: Job,
    old: Sequence[Generation],
    options: Options,
    model: ModelSource | None,
    left: set[bytes],
    allowance: Allowance,
) -> Iterator[Prepared]:
    """What is to be run, one after another: a run a generation and chunk size; each sees what those before it have stored.

    job: as `recode_job` gives it; model: the target's files, if they are there. left: gets the keys of chunks that the new generation
    holds with other bits, or that follow from such.

    Raises:
        DataError: chunks are not made of any prompt that is stored, so they cannot be decoded.
    """
    size = sum(file.stat().st_size for file in weight_files(model)) if model else 0
    for gen in old:
        facts = load_profile(job.store, gen.profile, target=gen.target, cache_format=job.cache_format).facts
        predictor = bytes.fromhex(facts.predictor)
        config = {
            "num_hidden_layers": facts.layers, "num_attention_heads": facts.kv_heads, "num_key_value_heads": facts.kv_heads,
            "head_dim": facts.head_dim,
        }  # fmt: skip
        memory = size + job.store.size(predictor_path(predictor))
        for step in sorted({row.chunk_tokens for rows in gen.rows.values() for row in rows}):
            prompts, others = prompts_of(job.store, gen, step, new_digests(find_profile(job) or job))
            left |= others
            note = f"{len(others):,} chunks are stored with other bits already and stay as they are"
            if prompts:
                yield Prepared(
                    replace(options, chunk_tokens=step),
                    replace(job, chunk_tokens=step, decoded=Decoded(predictor, gen.profile)),
                    config,
                    [],
                    "",
                    memory,
                    True,
                    allowance,
                    (note,) if others else (),
                    admitted=Admitted(prompts, [], 0),
                    whole=True,
                )


def of_one_scaling(store: Store, old: Replaced) -> tuple[Replaced, int]:
    """Without the generations whose FP8 caches have other scales than the one in use, and how many those are.

    Such are other caches: their chunks have other keys, which readers of a profile with these scales never ask for.
    """
    found = [
        scale_bytes(load_profile(store, gen.profile, target=old.target, cache_format=old.cache_format))
        for gen in old.generations
    ]
    kept = [gen for gen, scales in zip(old.generations, found, strict=True) if scales == found[0]]
    return replace(old, generations=kept), len(found) - len(kept)


def scale_bytes(profile: codec.Profile) -> bytes:
    """What the keys of an FP8 cache depend on besides tokens; empty for any other."""
    return b"" if profile.scales is None else profile.scales.to_bytes()


def recode_job(store: Store, old: Replaced, options: Options, model: ModelSource | None, allowance: Allowance) -> Job:
    """The job, with its profile if there is one. Raises UserError, and StoreFull where a new profile has no room."""
    profile = load_profile(store, old.generations[0].profile, target=old.target, cache_format=old.cache_format)
    job = Job(
        store,
        model or ModelSource("folder", "", old.name),
        old.target,
        old.cache_format,
        old.made.chunk_tokens,
        options.predictor or old.made.kind,
        options.loop,
        "",
        window=options.window,
        coder=options.coder,
        scale_mode=old.made.scale_mode,
        scales=scale_bytes(profile),
    )
    if model is not None and model.fingerprint(old.cache_format) != old.target:
        raise UserError(
            f"the files of {model.name!r} are not those of the target {old.target.hex()[:16]} that is stored; leave out --codec-only, "
            "or --model"
        )
    found = find_profile(job)
    if found is not None or model is not None:
        return found or job
    for coder in CODERS:
        other = find_profile(replace(job, coder=coder))
        if other is not None:
            return _with_coder(other, job.coder, allowance)
    raise UserError(
        f"the store has no calibration of --predictor {job.predictor_kind} --loop {job.loop} for the target {old.target.hex()[:16]}; "
        "pass --model with the target's files to make one, or compress a prompt with that rung first"
    )


def _with_coder(job: Job, coder: str, allowance: Allowance) -> Job:
    """The job under the same calibration for another coder. A dry run, too, puts the profile there: it is small, and used by nothing."""
    profile = load_profile(job.store, job.profile, target=job.target, cache_format=job.cache_format)
    made = codec.with_coder(load_predictor(job.store, job.predictor, "cpu"), profile, coder)
    return offer_profile(replace(job, coder=coder), put_profile(job.store, made, allowance.charge))


def read_again(store: Store, gen: Generation) -> Generation:
    """A generation as it is now, without its blobs."""
    found = Generation(gen.target, gen.profile)
    read_generation(store, found)
    return found


def new_digests(job: Job) -> dict[bytes, bytes]:
    """Key -> digest of the chain's bits, of what is in the new generation already."""
    gen = Generation(job.target, job.profile)
    if job.profile:
        read_generation(job.store, gen)
    return {key: rows[0].chain_digest for key, rows in gen.rows.items()}


def prompts_of(
    store: Store, gen: Generation, step: int, known: Mapping[bytes, bytes]
) -> tuple[list[Prompt], set[bytes]]:
    """The prompts that a generation's chunks of one size are made of, as far as they are stored; and keys of chunks left out.

    known: digests of chunks that are stored already. A chunk that another generation holds with other bits is left out, and what
    follows from it.
    """
    prompts: list[Prompt] = []
    reached: set[bytes] = set()
    left: set[bytes] = set()
    for number, stored in enumerate(stored_prompts(store, gen.target, gen.roots, gen.rows.__contains__)):
        if stored.chunk_tokens != step:
            continue
        keys: list[bytes] = []
        for key in stored.keys:
            rows = gen.rows.get(key)
            if rows is None:
                break
            if _differs(rows[0], known):
                left.update(key for key in stored.keys[len(keys) :] if key in gen.rows)
                break
            keys.append(key)
        reached.update(keys)
        if keys:
            prompts.append(
                Prompt(
                    stored.id, stored.n_tokens, b"".join(keys), stored.part, stored.row, keys[-1], (0, number),
                    f"{stored.part}:{stored.row + 1}", stored.tenant, stored.root,
                )
            )  # fmt: skip
    lost = [
        key for key, rows in gen.rows.items() if rows[0].chunk_tokens == step and key not in reached and key not in left
    ]
    if lost:
        raise DataError(
            f"{len(lost):,} chunks are made of no prompt that {store.uri} keeps, among them {lost[0].hex()}, so they cannot be decoded "
            "here; run the job on their corpus, or forget them with jobs/verify.py --repair"
        )
    return prompts, left - reached


def _differs(row: Row, known: Mapping[bytes, bytes]) -> bool:
    return known.get(row.key, row.chain_digest) != row.chain_digest


def check_same_bits(job: Job, old: Sequence[Generation], left: set[bytes]) -> None:
    """Raise DataError unless every chunk that was in use is in the new generation with the same bits, except those left out."""
    made = new_digests(job)
    for key, rows in ((key, rows) for gen in old for key, rows in gen.rows.items() if key not in left):
        if made.get(key) not in {row.chain_digest for row in rows}:
            what = "other bits" if key in made else "no row"
            raise DataError(
                f"the new generation in {job.store.uri} has {what} for chunk {key.hex()}; readers stay with the old one, run again"
            )
