"""Timing sides against each other: they take turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Note = Callable[[str], None]


def take_turns(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    note: Note,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each repeat of each side; a first round warms up and is not counted.

    clock: time.process_time for sides of one thread that wait for nothing; then what others do on the machine hardly counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            note(f"warming up: {name}" if not repeat else f"repeat {repeat} of {repeats}: {name}")
            begin = clock()
            side()
            if repeat:
                seconds[name].append(clock() - begin)
    return seconds
