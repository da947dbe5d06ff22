"""Progress while a job runs: the actors add up, the driver shows.

A bar on a terminal; elsewhere plain lines every few seconds, without control characters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

POLL_SECONDS = 0.5
LINE_SECONDS = 5.0


@dataclass
class Counts:
    """Sums over everything done so far."""

    tokens: int = 0  # of chunks stored by this run
    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    verified: int = 0

    def add(self, other: Counts) -> None:
        """Add another count to this one."""
        self.tokens += other.tokens
        self.chunks += other.chunks
        self.raw_bytes += other.raw_bytes
        self.stored_bytes += other.stored_bytes
        self.verified += other.verified

    @property
    def ratio(self) -> str:
        """Raw bytes over stored bytes so far, as text."""
        return f"{self.raw_bytes / self.stored_bytes:.2f}x" if self.stored_bytes else "-"


class ProgressBoard:
    """The body of the tiny Ray actor that encode and verify actors report to."""

    def __init__(self) -> None:
        self._counts = Counts()

    def add(self, counts: dict[str, int]) -> None:
        """Add one report."""
        self._counts.add(Counts(**counts))

    def read(self) -> dict[str, int]:
        """All reports so far, summed."""
        return asdict(self._counts)


class Reporter:
    """What an actor holds: sends counts to the board and never waits for an answer."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def add(self, counts: Counts) -> None:
        """Send one report; without a board it goes nowhere."""
        if self._board is not None:
            self._board.add.remote(asdict(counts))


class Display:
    """Shows the counts that `read` returns until the `with` block ends."""

    def __init__(self, console: Console, read: Callable[[], Counts], *, total_chunks: int, total_verify: int) -> None:
        self._console = console
        self._read = read
        self._total = total_chunks
        self._verify = total_verify
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._bar if console.is_terminal else self._lines, daemon=True)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(timeout=10)

    def line(self, counts: Counts) -> str:
        """One line of plain text."""
        text = f"{counts.tokens:,} tokens, {counts.chunks:,} of {self._total:,} chunks, ratio {counts.ratio}"
        return f"{text}, {counts.verified:,} of {self._verify:,} verified" if self._verify else text

    def _bar(self) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("starting the actors", total=self._total + self._verify)
            while not self._done.wait(POLL_SECONDS):
                counts = self._safely()
                if counts is not None and counts.chunks:
                    done = counts.chunks + counts.verified
                    progress.update(task, completed=done, description=self.line(counts))

    def _lines(self) -> None:
        shown = Counts()
        next_line = time.monotonic() + LINE_SECONDS
        while not self._done.wait(POLL_SECONDS):
            if time.monotonic() < next_line:
                continue
            next_line = time.monotonic() + LINE_SECONDS
            counts = self._safely()
            if counts is not None and counts != shown:
                shown = counts
                self._console.print(self.line(counts), highlight=False, soft_wrap=True)

    def _safely(self) -> Counts | None:
        """Read the counts; a display must never end a job, so a failing board only leaves it still."""
        try:
            return self._read()
        except Exception:
            return None
