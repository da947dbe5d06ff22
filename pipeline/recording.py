"""What a run came to, and its record in the store however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from codec.errors import KVCodecError
from pipeline.audit import Audit
from pipeline.options import Options
from pipeline.runs import FAILED, OK, RunRecord, new_run, now, plain_options, write_run
from pipeline.store import StoreFull
from pipeline.work import Job


@dataclass(frozen=True)
class Ran:
    """What a run came to: its exit status, the job with its profile, the report's figures, and the scalars of its chunks."""

    status: int
    job: Job
    figures: Mapping[str, Any]
    scalars: int = 0

    def plus(self, other: Ran) -> Ran:
        """This run and a later one of the same job together: whole numbers are added, all else is the later one's."""
        added = {
            name: value + self.figures.get(name, 0)
            for name, value in other.figures.items()
            if type(value) is int and name != "profile_bytes"
        }
        return Ran(max(self.status, other.status), other.job, dict(other.figures) | added, self.scalars + other.scalars)


@contextmanager
def recorded(
    kind: str, job: Job, options: Options, given: Mapping[str, Any] | None = None
) -> Iterator[Callable[[Ran], None]]:
    """Write a run record when the body ends; it calls what it is given with what it came to. Nothing is written in a dry run.

    given: what the record says was asked for, if not `options`.

    Raises StorageError where the record of a run that went well cannot be written.
    """
    run, started = new_run()
    done: list[Ran] = []

    def write(ran: Ran, outcome: str) -> None:
        figures, name = ran.figures, ran.job
        generation = f"{name.target.hex()}/{name.profile.hex()}" if name.profile else ""
        record = RunRecord(
            run=run,
            job=kind,
            started=started,
            ended=now(),
            outcome=outcome,
            model=name.model.name,
            fingerprint=name.target.hex(),
            generation=generation,
            rung=f"{name.predictor_kind} {name.loop}",
            cache_format=name.cache_format,
            tokens=figures.get("tokens", 0),
            chunks_new=figures.get("chunks_new", 0),
            chunks_reused=figures.get("chunks_shared", 0) + figures.get("chunks_skipped", 0),
            chunks_verified=figures.get("chunks_verified", 0),
            verification_failures=figures.get("chunks_failed", 0),
            scalars=ran.scalars,
            bytes=figures.get("stored_bytes", 0),
            options=plain_options(asdict(options) if given is None else given),
            health=figures.get("health") or {},
        )
        write_run(name.store, record)

    try:
        yield done.append
    except BaseException as error:
        # A store that is full, or at its limit, gets nothing more.
        if not options.dry_run and not isinstance(error, StoreFull):
            with suppress(KVCodecError):
                write(Ran(1, job, {}), FAILED)
        raise
    for ran in () if options.dry_run else done:
        write(ran, FAILED if ran.status else OK)


def record_audit(found: Audit, begun: tuple[str, str], given: Mapping[str, Any]) -> None:
    """Write the record of a verification of stored chunks; a store that only may be read gets none.

    begun: as `new_run` gives it; given: options. Target and generation are named where it looked at one only.
    """
    names = {f"{gen.target.hex()}/{gen.profile.hex()}" for gen in found.generations}
    targets = {gen.target.hex() for gen in found.generations}
    record = RunRecord(
        run=begun[0],
        job="verify",
        started=begun[1],
        ended=now(),
        outcome=FAILED if found.faults else OK,
        model=", ".join(sorted(set().union(*(gen.models for gen in found.generations)))),
        fingerprint=targets.pop() if len(targets) == 1 else "",
        generation=names.pop() if len(names) == 1 else "",
        rung="",
        cache_format=", ".join(sorted(set().union(*(gen.formats for gen in found.generations)))),
        tokens=found.tokens,
        chunks_new=0,
        chunks_reused=0,
        chunks_verified=found.decoded if given.get("deep") else found.checked,
        verification_failures=len(found.faults),
        scalars=0,
        bytes=found.stored_bytes,
        options=plain_options(given),
    )
    with suppress(KVCodecError):
        write_run(found.store, record)
