"""Make the golden set of a format version: files that every later release must read, and write again, bit for bit.

    python -m tests.make_golden            writes tests/data/v1, if it is not there
    python -m tests.make_golden --force    replaces it: only before the version has been released

Only the predictor's weights, the token ids and the caches come from here; all else follows from them. The caches are not
stored: the checksums of their raw bits are, and decoding must find them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

import codec
from codec.blob import VERSION
from codec.checksums import layer_checksums
from tests import codec_samples as samples

FOLDER = Path(__file__).resolve().parent / "data" / f"v{VERSION}"
CHUNK = 32
# name: (cache format, tokens, first token with hostile values or None, noise of the cache)
CASES: dict[str, tuple[str, int, int | None, float]] = {
    "bf16": ("bf16", 70, None, samples.PROFILE_NOISE),  # two whole chunks and a partial one
    "bf16-hostile": ("bf16", 40, 20, samples.PROFILE_NOISE),
    "bf16-outliers": ("bf16", 32, None, 3.0),  # residuals far outside the profile
    "fp16": ("fp16", 70, None, samples.PROFILE_NOISE),
    "fp16-hostile": ("fp16", 33, 0, samples.PROFILE_NOISE),
}


def make(folder: Path) -> None:
    """Write the golden set into a new folder."""
    folder.mkdir(parents=True)
    predictor = samples.build(samples.TINY, seed=11)
    (folder / "predictor.safetensors").write_bytes(predictor.to_bytes())
    profiles = {name: samples.make_profile(predictor, name) for name in ("bf16", "fp16")}
    record: dict[str, Any] = {
        "format": VERSION, "torch": torch.__version__.split("+")[0], "target": samples.TARGET.hex(), "chunk_tokens": CHUNK,
        "predictor": predictor.fingerprint.hex(), "profiles": {n: p.id.hex() for n, p in profiles.items()}, "cases": {},
    }  # fmt: skip
    for name, profile in profiles.items():
        (folder / f"profile-{name}.safetensors").write_bytes(profile.to_bytes())
    for seed, (case, (name, count, hostile, noise)) in enumerate(CASES.items()):
        profile, ids = profiles[name], samples.tokens(count, seed=100 + seed)
        values = samples.truth(predictor, predictor.new_state(), ids, profile.format, noise=noise, seed=seed)
        if hostile is not None:
            values = samples.with_hostile(values, profile.format, token=hostile)
        chunks = samples.encode_prompt(predictor, profile, ids, values, CHUNK)
        for n, chunk in enumerate(chunks):
            (folder / f"{case}-{n}.kv").write_bytes(chunk.blob)
        record["cases"][case] = {
            "cache_format": name, "token_ids": ids.tolist(), "keys": [k.hex() for k in samples.keys(ids, CHUNK, name)],
            "layer_checksums": [c.layer_checksums.hex() for c in chunks], "chain_digests": [c.chain_digest.hex() for c in chunks],
            "whole_checksums": layer_checksums(values, profile.format).hex(), "escapes": [c.stats.escapes for c in chunks],
            "blobs": [codec.content_id(c.blob).hex() for c in chunks],
        }  # fmt: skip
    (folder / "golden.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


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
