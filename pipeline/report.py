"""The figures of a run: what they mean, the table at the end, and the JSON file.

ratio                 raw bytes over the bytes of the blobs, of the corpus' distinct chunks, whichever run stored them
ratio_with_profile    the same with the profile added to the blobs
bits_per_scalar       bits on disk over scalars, headers and all; bits_k and bits_v: bitstreams of K and of V alone
ideal_bits_per_scalar sum of -log2 p over scalars, of the chunks that were encoded with that sum kept
prompts, tokens       of the corpus, shared prefixes counted once a prompt
chunks_new            distinct chunks that this run computed and stored
chunks_shared         occurrences of a chunk after its first in the corpus
chunks_skipped        distinct chunks that were stored already
raw_bytes             of the distinct chunks, as the target holds them; stored_bytes: their blobs
chunks_verified       chunks that came back from the store as the index says, new ones and those that an earlier run had stored and not
                      verified; chunks_failed: those that did not
bad_records           records that --skip-bad left out
health                of the new chunks: what layers cost beside what calibration promised (pipeline/health.py); null where nothing ran
target_tokens_per_s   tokens that ran through the target, over the seconds that its forward passes took
tokens_per_s          tokens of new chunks over the seconds that encode actors worked, loading of models left out; both
                      are rates of one actor, so their quotient says what compressing costs. null where nothing ran
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from codec.errors import StorageError
from pipeline.estimate import Estimate
from pipeline.health import Costs, Health
from pipeline.plan import Plan
from pipeline.work import WRITTEN, ChunkFigures, GroupResult


@dataclass(frozen=True)
class Outcome:
    """All that a run found out: figures of every distinct chunk, and what became of verification."""

    figures: Mapping[bytes, ChunkFigures]
    verified: frozenset[bytes]
    failed: Mapping[bytes, str]
    target_tokens: int = 0
    target_seconds: float = 0.0
    seconds: float = 0.0
    costs: tuple[tuple[Costs | None, int], ...] = ()  # a group each, and how many chunks they are of

    @staticmethod
    def of(results: Sequence[GroupResult], before: Mapping[bytes, ChunkFigures]) -> Outcome:
        """Merge the groups' results with what was stored before the run."""
        figures = dict(before)
        for result in results:
            for chunk in result.chunks:
                known = figures.get(chunk.key)
                # Two groups can meet one chunk: it is new if either of them wrote it.
                if known is None or known.outcome != WRITTEN:
                    figures[chunk.key] = chunk
        failed = {key: text for result in results for key, text in result.failed.items()}
        return Outcome(
            figures,
            frozenset(key for result in results for key in result.verified) - failed.keys(),
            failed,
            sum(result.target_tokens for result in results),
            sum(result.target_seconds for result in results),
            sum(result.seconds for result in results),
            tuple((result.costs, result.measured) for result in results),
        )


def make_report(
    plan: Plan, outcome: Outcome, *, profile_bytes: int, bad_records: int, health: Health | None = None
) -> dict[str, Any]:
    """The report as plain data, with the keys documented above and `per_prompt`."""
    chunks = [outcome.figures[key] for key in plan.chunks]
    new = [chunk for chunk in chunks if chunk.outcome == WRITTEN]
    raw, stored = _sum(chunks, "raw_bytes"), _sum(chunks, "stored_bytes")
    with_ideal = [c for c in chunks if c.ideal_bits_k is not None and c.ideal_bits_v is not None]
    ideal = sum((c.ideal_bits_k or 0.0) + (c.ideal_bits_v or 0.0) for c in with_ideal)
    return {
        "ratio": _per(raw, stored),
        "ratio_with_profile": _per(raw, stored + profile_bytes),
        "bits_per_scalar": _per(8 * stored, _scalars(chunks)),
        "bits_k": _per(8 * _sum(chunks, "bytes_k"), _sum(chunks, "scalars_k")),
        "bits_v": _per(8 * _sum(chunks, "bytes_v"), _sum(chunks, "scalars_v")),
        "ideal_bits_per_scalar": _per(ideal, _scalars(with_ideal)),
        "prompts": len(plan.prompts),
        "tokens": plan.tokens,
        "chunks_new": len(new),
        "chunks_shared": plan.shared,
        "chunks_skipped": len(chunks) - len(new),
        "raw_bytes": raw,
        "stored_bytes": stored,
        "profile_bytes": profile_bytes,
        "chunks_verified": len(outcome.verified),
        "chunks_failed": len(outcome.failed),
        "bad_records": bad_records,
        "target_tokens_per_s": _per(outcome.target_tokens, outcome.target_seconds),
        "tokens_per_s": _per(_sum(new, "tokens"), outcome.seconds) if new else None,
        "health": None if health is None else health.to_dict(),
        "per_prompt": _per_prompt(plan, outcome.figures),
    }


def _per_prompt(plan: Plan, figures: Mapping[bytes, ChunkFigures]) -> list[dict[str, Any]]:
    """An entry a prompt: sizes of all its chunks; how many were new, in an earlier prompt too, or stored before."""
    entries = []
    seen: set[bytes] = set()
    for prompt in plan.prompts:
        keys = prompt.all_keys()
        chunks = [figures[key] for key in keys]
        first = [chunk for chunk in chunks if chunk.key not in seen]
        new = sum(chunk.outcome == WRITTEN for chunk in first)
        seen.update(keys)
        raw, stored = _sum(chunks, "raw_bytes"), _sum(chunks, "stored_bytes")
        entries.append(
            {
                "id": prompt.id,
                "tokens": prompt.n_tokens,
                "chunks": len(chunks),
                "chunks_new": new,
                "chunks_shared": len(chunks) - len(first),
                "chunks_skipped": len(first) - new,
                "raw_bytes": raw,
                "stored_bytes": stored,
                "ratio": _per(raw, stored),
                "bits_per_scalar": _per(8 * stored, _scalars(chunks)),
            }
        )
    return entries


def _sum(chunks: Sequence[ChunkFigures], name: str) -> int:
    return sum(int(getattr(chunk, name)) for chunk in chunks)


def _scalars(chunks: Sequence[ChunkFigures]) -> int:
    return _sum(chunks, "scalars_k") + _sum(chunks, "scalars_v")


def _per(a: float, b: float) -> float | None:
    return a / b if b else None


# ---------------------------------------------------------------- showing it
def show_report(console: Console, report: Mapping[str, Any], title: str) -> None:
    """The table at the end of a run."""
    bits = (
        f"{_number(report['bits_per_scalar'], 3)} (K {_number(report['bits_k'], 3)}, V {_number(report['bits_v'], 3)})"
    )
    rows = [
        ("prompts", f"{report['prompts']:,}"),
        ("tokens", f"{report['tokens']:,}"),
        ("chunks", _chunks(report)),
        ("raw bytes", f"{report['raw_bytes']:,}"),
        ("stored bytes", f"{report['stored_bytes']:,} (and a profile of {report['profile_bytes']:,})"),
        ("ratio", f"{_number(report['ratio'], 2)}x ({_number(report['ratio_with_profile'], 2)}x with the profile)"),
        ("bits a scalar", bits),
        ("ideal code length", f"{_number(report['ideal_bits_per_scalar'], 3)} bits a scalar"),
        ("target alone", f"{_number(report['target_tokens_per_s'], 1)} tokens/s an actor"),
        ("with compression", f"{_number(report['tokens_per_s'], 1)} tokens/s an actor"),
        ("chunks verified", f"{report['chunks_verified']:,}, {report['chunks_failed']:,} failed"),
    ]
    if report["health"]:
        excess = report["health"]["excess_bits"]
        rows.insert(
            -3,
            ("beside calibration", f"{excess:+.3f} bits a scalar{' (drifted)' if report['health']['drifted'] else ''}"),
        )
    if report["bad_records"]:
        rows.append(("bad records", f"{report['bad_records']:,} skipped"))
    show_rows(console, title, rows)


def show_estimate(console: Console, found: Estimate, title: str) -> None:
    """The table of a dry run."""
    rows = [
        ("prompts", f"{found.prompts:,}"),
        ("tokens", f"{found.tokens:,} ({found.new_tokens:,} in new chunks)"),
        ("chunks", _chunks(found.to_dict())),
        ("raw bytes", f"{found.raw_bytes:,} of the new chunks"),
        ("expected bytes", f"{found.expected_bytes:,} ({found.expected_bytes_from})"),
        ("expected time", f"{duration(found.expected_seconds)} ({found.expected_seconds_from})"),
    ]
    show_rows(console, title, rows)


def show_rows(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns: a drawn table on a terminal, aligned plain text elsewhere."""
    if console.is_terminal:
        table = Table(title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
        return
    width = max(len(name) for name, _ in rows)
    say(console, title)
    for name, value in rows:
        say(console, f"  {name.ljust(width)}  {value}")


def say(console: Console, text: str, **about: str) -> None:
    """One line as it is: no markup, no colours, no wrapping. about: what a log that takes fields says beside it, such as prompt."""
    event = getattr(console, "event", None)
    if event is not None:
        event(text, **about)
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _chunks(figures: Mapping[str, Any]) -> str:
    new, shared, skipped = (figures[f"chunks_{name}"] for name in ("new", "shared", "skipped"))
    return f"{new:,} new, {shared:,} shared, {skipped:,} skipped"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def write_report(path: str, report: Mapping[str, Any]) -> None:
    """Write the report as JSON: all of it, or nothing.

    Raises:
        StorageError: the file cannot be written.
    """
    write_file(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def write_file(path: str, text: str) -> None:
    """Write a local file: all of it, or nothing. Raises StorageError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"the report {path} cannot be written ({error.strerror})") from error
