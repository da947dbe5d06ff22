"""Files that an earlier run has restored: whether they are what this run would write, so that they can stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codec.errors import DataError, UserError
from pipeline.restoration.catalogue import Catalogue, Ids, Match
from pipeline.restoration.files import read_metadata
from pipeline.restoration.span import Range
from pipeline.work import predictor_config

WAY_OUT = "pass --overwrite or another --out"


class EarlierFiles:
    """Looks at files as a job on this catalogue meets them; layers, heads: the ranges that the job was asked for."""

    def __init__(self, catalogue: Catalogue, layers: Range | None = None, heads: Range | None = None) -> None:
        self._catalogue, self._asked = catalogue, {"layers": layers, "kv_heads": heads}
        self._shapes: dict[bytes, dict[str, object]] = {}

    def is_whole(self, path: Path, ids: Ids, salt: bytes, matches: Sequence[Match], notes: Sequence[str] = ()) -> bool:
        """Whether the file holds all that is stored of a prompt; False where it holds a shorter prefix of that.

        matches, notes: what Catalogue.find says of the prompt, ids int64 [T]. A file names the bits of all of its cache by their digest,
        so it is told from one of another prompt, and of other bits, without anything being decoded.

        Raises:
            UserError: it holds something else: another target's cache, another prompt's, or another range of layers or heads.
            DataError: it is no restored file, or is cut short; what the store says of itself is damaged.
            StorageError: the store cannot be read.
        """
        found, target = read_metadata(path), self._catalogue.target.hex()
        if found["target"] != target:
            raise UserError(
                f"the file {path} holds the cache of target {found['target'][:16]}, and readers follow {target[:16]} now; {WAY_OUT}"
            )
        if not matches:
            if notes:
                raise DataError(notes[0])
            raise UserError(
                f"the store holds nothing of the prompt of that id any more, so the file {path} cannot be checked; {WAY_OUT}"
            )
        tokens = int(found["tokens"])
        held = self._held(ids[: max(tokens, 0)], salt, tokens, found["digest"])
        if not held:
            raise UserError(
                f"the file {path} holds another cache than the store has of the prompt of that id now: of another prompt, with other bits, "
                f"or in chunks of another size; {WAY_OUT}"
            )
        for name, key in (("layers", "layers"), ("heads", "kv_heads")):
            if found[name] != (wanted := self._range(key, held[0])):
                raise UserError(f"the file {path} holds {name} {found[name]}, and asked for are {wanted}; {WAY_OUT}")
        return tokens == matches[0].tokens

    def _held(self, ids: Ids, salt: bytes, tokens: int, digest: str) -> list[Match]:
        """Of the prompt's first tokens, what is stored of just these, with these bits. Their last chunk may be one that was cut off then
        and is a whole one of the longer prompt now."""
        found = self._catalogue.find(ids, salt)[0]
        return [m for m in found if m.tokens == tokens and m.chunks[-1].digest.hex() == digest]

    def _range(self, key: str, match: Match) -> str:
        """The range that is asked for, as a file says it."""
        asked = self._asked[key]
        if asked is not None:
            return "{}:{}".format(*asked)
        name = match.generation.predictor
        if name not in self._shapes:
            self._shapes[name] = predictor_config(self._catalogue.store, name)
        return f"0:{self._shapes[name].get(key)}"
