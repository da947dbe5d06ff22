"""What a job says while it runs, on standard error: lines for people, or with --log-json one JSON object a line."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from jobs.configuration import Given
from pipeline.secrets import without_secrets


class Notes(Console):
    """A console that begins with the job's options, so that a request which is refused at once is answered by one sentence alone.

    As JSON, a line is an object with time, job, store, model and message, prompt where the message is about one, and level "error" where
    the job ends with it. Messages name prompts by their ids and never quote them.
    """

    def __init__(self, given: Given, job: str) -> None:
        self._json = bool(given.values.get("log_json"))
        super().__init__(stderr=True, force_terminal=False if self._json else None)
        self._given, self._job, self._begun = given, job, False

    def print(self, *objects: Any, **keywords: Any) -> None:
        """As Console.print."""
        self._begin()
        if self._json:
            self.event(" ".join(map(str, objects)))
        else:
            super().print(*objects, **keywords)

    def event(self, message: str, **fields: str) -> None:
        """One line; fields: what it is about, such as prompt."""
        self._begin()
        if not self._json:
            super().print(message, markup=False, highlight=False, soft_wrap=True)
            return
        self._line(message, **fields)

    def error(self, message: str) -> None:
        """What the job ends with. The options are not shown for it: a request that is refused at once is answered by it alone."""
        if self._json:
            self._line(message, level="error")
        else:
            print_error(message)

    def _line(self, message: str, **fields: Any) -> None:
        about = {
            name: without_secrets(str(self._given.values[name]))
            for name in ("store", "model")
            if self._given.values.get(name)
        }
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "job": self._job, **about, **fields}
        sys.stderr.write(json.dumps(line | {"message": message}, ensure_ascii=False) + "\n")
        sys.stderr.flush()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        if self._json:
            self._line("begun", options=self._given.plain())
        else:
            self._given.show(self)


def print_error(message: str) -> None:
    """An error on standard error, for people: one line, as it is."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {message}")
