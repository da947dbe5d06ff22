"""What a run verifies besides the new chunks of its sample: what no run has verified yet, and in a recompression all of its sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from pipeline.committed import Committed
from pipeline.plan import Plan
from pipeline.report import Outcome
from pipeline.unverified import clear, read_marks
from pipeline.work import ChunkFigures, GroupResult, Job

Figures = dict[bytes, ChunkFigures]


def marks_of(job: Job) -> dict[str, frozenset[bytes]]:
    """The marks of the job's generation; none where it verifies nothing, or has no profile yet. Raises DataError, StorageError."""
    return read_marks(job.store, job.target, job.profile) if job.verify.fraction and job.profile else {}


def unseen(figures: Mapping[bytes, ChunkFigures], marks: Mapping[str, Set[bytes]], seen: Set[bytes]) -> Figures:
    """Those of the chunks that are in a mark and were not seen."""
    marked: frozenset[bytes] = frozenset().union(*marks.values())
    return {key: found for key, found in figures.items() if key in marked and key not in seen}


def with_unseen(
    job: Job, plan: Plan, before: Committed, results: list[GroupResult], verify: Callable[[Figures], list[GroupResult]], *, whole: bool
) -> tuple[Outcome, Set[bytes]]:  # fmt: skip
    """What a run came to when it has verified that, too, and the keys of all chunks that it had to verify.

    results: of its groups; verify: decodes these chunks, whatever the job's sample is; whole: the sample is of all chunks, not of new ones.
    """
    marks, outcome = marks_of(job), Outcome.of(results, before.figures)
    seen = outcome.verified | outcome.failed.keys()
    again = unseen(outcome.figures, marks, seen)
    sample = {key for key in (plan.chunks if whole else plan.new) if job.verify.selects(key)}
    again |= {key: outcome.figures[key] for key in sample & outcome.figures.keys() - seen}
    if again:
        outcome = Outcome.of([*results, *verify(again)], before.figures)
    clear(job.store, marks, outcome.verified)
    return outcome, sample | again.keys()
