"""A run that meets a lost chunk which holds other bits now: what followed from the old ones is dropped and made again."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.committed import Committed
from pipeline.lease import exclusive
from pipeline.plan import Plan
from pipeline.ray_runtime import our_error
from pipeline.removal import drop_chain
from pipeline.work import GroupResult, Job, OtherBits

Planned = tuple[Committed, Plan]


def computed(
    job: Job,
    planned: Planned,
    compute: Callable[[Committed, Plan], list[GroupResult]],
    replan: Callable[[], Planned],
    tell: Callable[[str], None],
) -> tuple[list[GroupResult], Committed, Plan]:
    """What `compute` made of a plan; of a newer one where chains had to be dropped (DESIGN 8).

    The chunks of a chain that are stored must follow from one another's bits. A target on other hardware computes others,
    so where one chunk's are gone for good, those of all chunks after it are of no use, in this corpus or in others.

    Raises:
        UserError: a collection or a repair is at work, so nothing can be dropped now.
    """
    while True:
        before, plan = planned
        try:
            return (compute(before, plan) if plan.groups else []), before, plan
        except Exception as error:
            other = our_error(error)
            if not isinstance(other, OtherBits):
                raise
            key, digest = other.chunk
            with exclusive(job.store):
                removed = drop_chain(job.store, job.target, job.profile, key, digest)
            tell(
                f"chunk {key.hex()[:16]} was lost and holds other bits now: {removed.rows:,} chunks that follow from the old "
                "ones are made again"
            )
            planned = replan()
