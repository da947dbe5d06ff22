"""What `coder` and `peers` are asked to do: a closed loop with rANS on one core, beside which others are measured."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from codec import rans
from codec.errors import UserError
from jobs.arguments import add_cache, add_window
from jobs.bench import rate


@dataclass(frozen=True)
class OneCore:
    """The names are those of the command line."""

    model: str
    calibration: str
    eval: str
    predictor: str = rate.Settings.predictor
    window: int | None = None
    cache_dtype: str | None = None
    fp8_scale: str | None = None
    tokens: int = 512
    train: int = 4
    test: int = 1
    chunk_tokens: int = 256
    repeats: int = 5

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        self.rate().check()
        if not 1 <= self.repeats <= 1000:
            raise UserError(f"--repeats {self.repeats} must be at least 1 and at most 1000")

    def rate(self) -> rate.Settings:
        """What `rate` calls the same; one thread."""
        given = {f.name: getattr(self, f.name) for f in fields(rate.Settings) if hasattr(self, f.name)}
        return rate.Settings(**(given | {"loop": "closed", "coder": rans.NAME, "threads": 1}))


def add_one_core(parser: argparse.ArgumentParser, given: OneCore) -> None:
    """The options of these settings, with the defaults that are given."""
    rate.add_inputs(parser)
    add_window(parser)
    add_cache(parser)
    for name, text in (
        ("tokens", "tokens of a prompt; shorter prompts are skipped"), ("train", "prompts to calibrate on"),
        ("test", "prompts to measure"), ("chunk_tokens", "tokens of a chunk"), ("repeats", "of every side"),
    ):  # fmt: skip
        flag, value = "--" + name.replace("_", "-"), getattr(given, name)
        parser.add_argument(flag, type=int, default=value, metavar="N", help=text + " (default: %(default)s)")
