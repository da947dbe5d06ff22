"""Which target is meant: by its files, its fingerprint, or the name it has in the index. Its weights are never loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from codec.errors import UserError
from codec.formats import FORMATS
from pipeline import index
from pipeline.current import read_pointers
from pipeline.model_source import ModelSource, resolve_cache_format, resolve_model
from pipeline.paths import parse_index_path, target_index_prefix
from pipeline.store import Store

_HEX = re.compile(r"[0-9a-fA-F]{64}")


def find_target(store: Store, model: str | os.PathLike[str], cache_dtype: str | None = None) -> bytes:
    """The fingerprint of the target that `model` names.

    model: a folder or GGUF file (read through once, as the fingerprint is made of its bytes), a fingerprint of 64 hex digits, the
    name a model has in the store's index, or a hub id. Of a name's targets it is the one that its pointer names (pipeline/current.py),
    where there is one. cache_dtype: which of a model's caches, where the store has several;
    without it the one in the model's own dtype, or the only one.

    Raises:
        UserError: no such model, nothing stored of it, or several that are meant.
    """
    text = os.fspath(model)
    if cache_dtype is not None and cache_dtype not in FORMATS:
        raise UserError(f"the cache dtype {cache_dtype!r} is unknown; pass {', '.join(FORMATS)}")
    if _HEX.fullmatch(text):
        target = bytes.fromhex(text)
        if not has_index(store, target):
            raise UserError(f"the store {store.uri} holds nothing of the target {text[:16]}…")
        return target
    if is_name(text):
        pointed = _pointed(store, text, cache_dtype)
        if pointed is not None:
            return pointed
        named = targets_named(store, text, cache_dtype)
        if named:
            return _only(store, text, named)
        other = targets_named(store, text, None) if cache_dtype is not None else {}
        if other:
            formats = sorted(set().union(*other.values()))
            raise UserError(
                f"the store {store.uri} holds caches of {text!r} in {' and '.join(formats)}, not in {cache_dtype}"
            )
        if "/" not in text:
            raise UserError(
                f"the model {text!r} is no folder or file here, no fingerprint, and no name in the index of {store.uri}"
            )
    return target_of_files(store, resolve_model(text), cache_dtype)


def is_name(model: str | os.PathLike[str]) -> bool:
    """Whether it can only be a name: neither a fingerprint nor something that lies here. What a name stands for can change."""
    text = os.fspath(model)
    return not _HEX.fullmatch(text) and not os.path.exists(os.path.expanduser(text))


def is_known_name(store: Store, model: str | os.PathLike[str], cache_dtype: str | None) -> bool:
    """Whether the store knows a model by this name; a hub id, for one, says which files are meant."""
    text = os.fspath(model)
    return is_name(text) and (
        _pointed(store, text, cache_dtype) is not None or bool(targets_named(store, text, cache_dtype))
    )


def followed(store: Store, model: str | os.PathLike[str], cache_dtype: str | None) -> bytes | None:
    """The target that readers who asked for this are to follow now; None where no pointer has its name."""
    return _pointed(store, os.fspath(model), cache_dtype) if is_name(model) else None


def _pointed(store: Store, name: str, cache_dtype: str | None) -> bytes | None:
    """The target that readers of this name are to follow. UserError where it has pointers for several formats."""
    found = {fmt: entry for fmt, entry in read_pointers(store).of_model(name).items() if cache_dtype in (None, fmt)}
    if len(found) > 1:
        return _only(store, name, {entry.target: {fmt} for fmt, entry in found.items()})
    return next((entry.target for entry in found.values()), None)


def target_of_files(store: Store, source: ModelSource, cache_dtype: str | None = None) -> bytes:
    """The fingerprint of a model's files under a cache format that is stored. Raises UserError."""
    formats = [cache_dtype] if cache_dtype else list(FORMATS)
    stored = {f: source.fingerprint(f) for f in formats if has_index(store, source.fingerprint(f))}
    if not stored:
        what = f" in {cache_dtype}" if cache_dtype else ""
        raise UserError(f"the store {store.uri} holds no cache{what} of the model {source.name!r} with these weights")
    own = resolve_cache_format(source, cache_dtype) if len(stored) > 1 else next(iter(stored))
    if own not in stored:
        raise UserError(f"the store holds caches of {source.name!r} in {' and '.join(stored)}; say which is meant")
    return stored[own]


def has_index(store: Store, target: bytes) -> bool:
    """Whether anything of this target was ever committed."""
    return next(iter(store.list(target_index_prefix(target))), None) is not None


def targets_named(store: Store, name: str, cache_dtype: str | None) -> dict[bytes, set[str]]:
    """Fingerprint -> cache formats of the targets that have this name in the index."""
    found: dict[bytes, set[str]] = {}
    for path in store.list("index"):
        if not path.endswith(".parquet"):
            continue
        target, profile = parse_index_path(path)
        table = index.read_part(store, path, target=target, profile=profile, columns=["model", "cache_format"])
        pairs = set(zip(table["model"].to_pylist(), table["cache_format"].to_pylist(), strict=True))
        formats = {fmt for model, fmt in pairs if model == name and cache_dtype in (None, fmt)}
        if formats:
            found.setdefault(target, set()).update(formats)
    return found


def _only(store: Store, name: str, found: dict[bytes, set[str]]) -> bytes:
    if len(found) == 1:
        return next(iter(found))
    raise UserError(
        f"the name {name!r} stands for {len(found)} targets in {store.uri} ({_listed(found.items())}): other weights, or other "
        "cache formats; pass the model's files, one of these fingerprints, or a cache dtype"
    )


def _listed(items: Iterable[tuple[bytes, set[str]]]) -> str:
    return ", ".join(f"{target.hex()} {'/'.join(sorted(formats))}" for target, formats in sorted(items)[:4])
