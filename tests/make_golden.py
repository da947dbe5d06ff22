"""Make the golden set of a format version: files that every later release must read, and write again, bit for bit.

    python -m tests.make_golden            writes tests/data/v1, if it is not there
    python -m tests.make_golden --force    replaces it: only before the version has been released

Only the weights, the token ids and the caches come from here; all else follows from them. The caches are not stored: the
checksums of their raw bits are, and decoding must find them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

import codec
from codec.blob import VERSION
from codec.checksums import layer_checksums
from codec.coders import DEFAULT
from codec.entropy import BACKEND
from tests import codec_samples as samples
from tests.float_model import World

FOLDER = Path(__file__).resolve().parent / "data" / f"v{VERSION}"
CHUNK = 32
# Small, as the files are committed; three layers, so that corrections reach a layer that corrects in its turn.
CONFIG: dict[str, Any] = samples.TINY | {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
}  # fmt: skip
HALF_TURNED: dict[str, Any] = CONFIG | {
    "rope_parameters": {"rope_type": "linear", "factor": 1.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# predictor: (config, kind, K and V projections in full precision, window)
PREDICTORS: dict[str, tuple[dict[str, Any], str, bool, int]] = {
    "fp8": (CONFIG, "fp8", False, 0),
    "fp8-kv16": (CONFIG, "fp8", True, 0),
    "int8-kv16": (HALF_TURNED, "int8", True, 0),
    **{kind: (CONFIG, kind, True, 0) for kind in ("int8-mixed", "int8-a16", "int4", "mxfp4", "static", "linear")},
    "int8-window": (CONFIG, "int8", True, 9),
}


class Setting(NamedTuple):
    """What a profile is for; mode: of an FP8 cache's scales."""

    predictor: str
    loop: str
    cache_format: str
    mode: str = ""
    coder: str = DEFAULT


PROFILES = {
    "fp8-open-bf16": Setting("fp8", "open", "bf16"),
    "fp8-open-fp16": Setting("fp8", "open", "fp16"),
    "fp8-open-fp8_e4m3": Setting("fp8", "open", "fp8_e4m3", "tensor"),
    "fp8-closed-bf16": Setting("fp8-kv16", "closed", "bf16"),
    "fp8-closed-fp16": Setting("fp8-kv16", "closed", "fp16"),
    "fp8-closed-fp8_e4m3": Setting("fp8-kv16", "closed", "fp8_e4m3", "tensor"),
    "int8-open-bf16": Setting("int8-kv16", "open", "bf16"),
    "int8-closed-bf16": Setting("int8-kv16", "closed", "bf16"),
    "int8-closed-fp8_e5m2": Setting("int8-kv16", "closed", "fp8_e5m2", "none"),
    "int8_mixed-closed-bf16": Setting("int8-mixed", "closed", "bf16"),
    "int8_a16-closed-bf16": Setting("int8-a16", "closed", "bf16"),
    "int8_a16-closed-fp32": Setting("int8-a16", "closed", "fp32"),
    "int8_a16-closed-fp8_e4m3": Setting("int8-a16", "closed", "fp8_e4m3", "head"),
    "int4-closed-bf16": Setting("int4", "closed", "bf16"),
    "mxfp4-closed-bf16": Setting("mxfp4", "closed", "bf16"),
    "static-closed-bf16": Setting("static", "closed", "bf16"),
    "linear-closed-bf16": Setting("linear", "closed", "bf16"),
    "linear-closed-fp8_e4m3": Setting("linear", "closed", "fp8_e4m3", "tensor"),
    "int8_window-closed-bf16": Setting("int8-window", "closed", "bf16"),
    "fp8-open-bf16-constriction": Setting("fp8", "open", "bf16", coder=BACKEND),
    "int8_a16-closed-bf16-constriction": Setting("int8-a16", "closed", "bf16", coder=BACKEND),
    "fp8-closed-fp8_e4m3-constriction": Setting("fp8-kv16", "closed", "fp8_e4m3", "tensor", BACKEND),
}


class Case(NamedTuple):
    """One prompt of the set: hostile is the first token with hostile values, noise is added to the model's own cache."""

    profile: str
    tokens: int
    hostile: int | None = None
    noise: float = 0.0


CASES = {
    "fp8-open-bf16": Case("fp8-open-bf16", 70),  # two whole chunks and a partial one
    "fp8-open-bf16-hostile": Case("fp8-open-bf16", 40, hostile=20),
    "fp8-open-bf16-outliers": Case("fp8-open-bf16", 32, noise=6.0),  # residuals far outside the profile
    "fp8-open-fp16": Case("fp8-open-fp16", 70),
    "fp8-open-fp16-hostile": Case("fp8-open-fp16", 33, hostile=0),
    "fp8-closed-bf16": Case("fp8-closed-bf16", 70),
    "fp8-closed-bf16-hostile": Case("fp8-closed-bf16", 50, hostile=40),
    "fp8-closed-bf16-outliers": Case("fp8-closed-bf16", 32, noise=6.0),
    "fp8-closed-fp16": Case("fp8-closed-fp16", 70),
    "fp8-closed-fp16-hostile": Case("fp8-closed-fp16", 33, hostile=0),
    "int8-open-bf16": Case("int8-open-bf16", 33),
    "int8-closed-bf16": Case("int8-closed-bf16", 70),
    "int8-closed-bf16-hostile": Case("int8-closed-bf16", 34, hostile=30),
    "fp8-open-fp8_e4m3": Case("fp8-open-fp8_e4m3", 33),
    "fp8-closed-fp8_e4m3-hostile": Case("fp8-closed-fp8_e4m3", 40, hostile=30),
    "int8-closed-fp8_e5m2-hostile": Case("int8-closed-fp8_e5m2", 40, hostile=36),
    "int8_a16-closed-fp32-hostile": Case("int8_a16-closed-fp32", 34, hostile=32),
    "int8_window-closed-bf16": Case("int8_window-closed-bf16", 70),
    "fp8-open-bf16-constriction-hostile": Case("fp8-open-bf16-constriction", 40, hostile=20),
    "int8_a16-closed-bf16-constriction-hostile": Case("int8_a16-closed-bf16-constriction", 34, hostile=30),
}
# every other profile: one short prompt of two chunks
CASES |= {name: Case(name, 36) for name in PROFILES if name not in {case.profile for case in CASES.values()}}


def make(folder: Path) -> None:
    """Write the golden set into a new folder."""
    folder.mkdir(parents=True)
    worlds = {name: World(c, kind, seed=11, exact_kv=kv, window=w) for name, (c, kind, kv, w) in PREDICTORS.items()}
    profiles = {
        name: worlds[s.predictor].profile(s.loop, s.cache_format, s.mode or "tensor", s.coder)
        for name, s in PROFILES.items()
    }
    record: dict[str, Any] = {
        "format": VERSION, "torch": torch.__version__.split("+")[0], "target": samples.TARGET.hex(), "chunk_tokens": CHUNK,
        "predictors": {n: w.predictor.fingerprint.hex() for n, w in worlds.items()},
        "profiles": {n: {"id": p.id.hex(), "predictor": PROFILES[n].predictor} for n, p in profiles.items()}, "cases": {},
    }  # fmt: skip
    for name, w in worlds.items():
        (folder / f"predictor-{name}.safetensors").write_bytes(w.predictor.to_bytes())
    for name, profile in profiles.items():
        (folder / f"profile-{name}.safetensors").write_bytes(profile.to_bytes())
    for seed, (name, case) in enumerate(CASES.items()):
        w, profile = worlds[PROFILES[case.profile].predictor], profiles[case.profile]
        ids = w.tokens(case.tokens, seed=100 + seed)
        values = cache(w, profile, ids, case, seed)
        chunks = samples.encode_prompt(w.predictor, profile, ids, values, CHUNK)
        for n, chunk in enumerate(chunks):
            (folder / f"{name}-{n}.kv").write_bytes(chunk.blob)
        record["cases"][name] = {
            "profile": case.profile, "token_ids": ids.tolist(),
            "keys": [k.hex() for k in samples.keys(ids, CHUNK, profile.cache_format)],
            "layer_checksums": [c.layer_checksums.hex() for c in chunks], "chain_digests": [c.chain_digest.hex() for c in chunks],
            "whole_checksums": layer_checksums(values, profile.format).hex(), "escapes": [c.stats.escapes for c in chunks],
            "blobs": [codec.content_id(c.blob).hex() for c in chunks],
        }  # fmt: skip
    (folder / "golden.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def cache(w: World, profile: codec.Profile, ids: torch.Tensor, case: Case, seed: int) -> samples.Layers:
    """The case's truth."""
    mode = profile.facts.scale_mode or "tensor"
    values, generator = w.truth(ids, profile.cache_format, mode), torch.Generator().manual_seed(3000 + seed)
    if case.noise:
        values = [
            (samples.cast(k + torch.randn(k.shape, generator=generator) * case.noise, profile.format),
             samples.cast(v + torch.randn(v.shape, generator=generator) * case.noise, profile.format))
            for k, v in values
        ]  # fmt: skip
    return values if case.hostile is None else samples.with_hostile(values, profile.format, token=case.hostile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="replace an existing set")
    if FOLDER.exists():
        if not parser.parse_args().force:
            parser.exit(
                2, f"{FOLDER.name} exists; a released version's golden set never changes. Use --force before release.\n"
            )
        shutil.rmtree(FOLDER)
    else:
        parser.parse_args()
    make(FOLDER)
    size = sum(f.stat().st_size for f in FOLDER.iterdir())
    print(f"wrote {len(list(FOLDER.iterdir()))} files, {size} bytes, to tests/data/{FOLDER.name}")


if __name__ == "__main__":
    main()
