"""The tokenise stage of a recompression: prompts that the store keeps of one target, told again to another.

Text and messages are rendered anew, as the new model's tokenizer or template may differ. A prompt that was cut when it was stored is
cut at the same place as long as its tokens are the same. Prompts that were given as token ids stay what they are; where the
tokenizer has changed they mean something else, and whoever runs the job has to say what is to become of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from codec.errors import DataError, UserError
from pipeline.corpus import Record
from pipeline.options import read_salt
from pipeline.paths import prompts_prefix
from pipeline.prompts import Tokenise, Tokenising, load_part, part_rows
from pipeline.render import BadPrompt
from pipeline.store import Store

KEEP, SKIP = "keep", "skip"
TOKEN_IDS = (KEEP, SKIP)
_UNLIMITED = 1 << 62

# How a prompt was told, in a column beside those of ROW_SCHEMA.
SAME, OTHER, IDS, FOREIGN = "same", "other", "ids", "foreign"
_TOLD = pa.field("told", pa.string())


@dataclass
class Retelling:
    """Which prompts a recompression takes from the store, and what is to become of those that cannot be told again.

    target: whose prompts; salt_envs: environment variables with the salts of tenants; skip_tenants: leave out tenants whose salt is
    not given; token_ids: KEEP or SKIP, for when the tokenizer has changed.
    """

    target: bytes
    salt_envs: tuple[str, ...] = ()
    skip_tenants: bool = False
    token_ids: str | None = None
    told: Counter[str] = field(default_factory=Counter)  # how many prompts were told in which way

    def parts(self, store: Store) -> list[str]:
        """Paths of the prompts parts. UserError where there are none."""
        found = list(store.list(prompts_prefix(self.target)))
        if not found:
            raise UserError(
                f"the store {store.uri} keeps no prompts of the target {self.target.hex()[:16]}; pass --prompts"
            )
        return found

    def salts(self) -> list[bytes]:
        """Those of the tenants. Raises UserError for a variable that is not set."""
        return [read_salt(name) for name in self.salt_envs]

    def rows(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The stage's output as that of the tokenise stage, without the prompts that are to be left out.

        Raises UserError at its end, where something is to be left out and nobody said so.
        """
        self.told = Counter()
        for table in tables:
            told = table["told"]
            self.told.update(told.to_pylist())
            out = {*([FOREIGN] if self.skip_tenants else []), *([IDS] if self.token_ids == SKIP else [])}
            keep = pc.invert(pc.is_in(told, value_set=pa.array(sorted(out), pa.string())))
            yield table.drop_columns(["told"]).filter(keep)
        if self.told[FOREIGN] and not self.skip_tenants:
            raise UserError(
                f"{self.told[FOREIGN]:,} prompts are of tenants whose salts were not given, without which their keys cannot be "
                "made; pass --salt-env NAME once a tenant, or --skip-tenants to leave them out"
            )
        if self.told[IDS] and self.told[OTHER] and self.token_ids is None:
            raise UserError(
                f"{self.told[IDS]:,} prompts were given as token ids, and this model's tokenizer or template reads "
                f"{self.told[OTHER]:,} others in other ids than before; pass --token-ids keep if the ids are right for this model, "
                "too, or --token-ids skip"
            )


class Retell(Tokenise):
    """The stage's callable: paths of prompts parts in, tables of ROW_SCHEMA with `told` out."""

    def __init__(self, settings: Tokenising, roots: Mapping[str, bytes]) -> None:
        """roots: tenant -> key of the empty prefix under the new target."""
        super().__init__(settings)
        self._roots = roots

    def _file(self, file: str, index: int, shard: int, shards: int) -> Iterator[pa.Table]:
        stored = part_rows(load_part(self._settings.store, file))
        rows = [self._retold(row, file, index, number) for number, row in enumerate(stored)]
        told = pa.array([row.pop("told") for row in rows], pa.string())
        for table in self._flush(rows):
            yield table.append_column(_TOLD, told)

    def _retold(self, row: dict[str, Any], part: str, file: int, number: int) -> dict[str, Any]:
        source = f"{part}:{number + 1}"
        place = {"file": file, "record": number, "source": source, "reason": None}
        if row["tenant"] not in self._roots:
            return place | {"told": FOREIGN, "reason": "is of a tenant whose salt was not given"}
        record, kept = _record(row, source), list(row["token_ids"])
        told = IDS
        try:
            ids = self._ids(record, _UNLIMITED)
            if ids[: len(kept)] == kept:
                ids = kept  # it was cut when it was stored
            if record.kind != "token_ids":
                told = SAME if ids == kept else OTHER
            limit = self._settings.context_length
            if len(ids) > limit:
                raise BadPrompt(record, f"has {len(ids)} tokens, over the model's context length of {limit}")
        except BadPrompt as error:
            return place | {"told": told, "reason": f"the prompt {record.id!r} {error.reason}"}
        owner = row["tenant"], self._roots[row["tenant"]]
        return place | {"told": told} | self._usable(record, ids, *owner)


def _record(row: Mapping[str, Any], source: str) -> Record:
    try:
        payload = json.loads(row["payload"])
        return Record(str(row["id"]), payload.pop("kind"), payload, source)
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise DataError(
            f"the prompt {row['id']!r:.80} at {source} is not kept as it was given; pass --prompts"
        ) from None
