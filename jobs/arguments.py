"""Options of command lines that several jobs share: how the predictor guesses, what the cache is, a store, a time."""

from __future__ import annotations

import argparse
import re

from pipeline.options import CACHE_FORMATS, CODERS, DEFAULT_FP8_SCALE, FP8_SCALES, LOOPS, Options

GRACE = 24 * 3600.0  # seconds
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """A time such as 90, 90s, 15m, 24h or 7d, in seconds; argparse turns what this raises into a usage error."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 15m, 24h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store, of a store that exists."""
    parser.add_argument("--store", required=True, metavar="URI", help="the store: a folder or s3://bucket/prefix")


def add_loop(parser: argparse.ArgumentParser) -> None:
    """--loop and --window."""
    parser.add_argument(
        "--loop",
        default=Options.loop,
        choices=LOOPS,
        help="whether the predictor sees decoded values (default: %(default)s)",
    )
    add_window(parser)


def add_window(parser: argparse.ArgumentParser) -> None:
    """--window."""
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="the predictor attends to the first tokens, the last N, and a summary of those between (default: to all)",
    )


def add_coder(parser: argparse.ArgumentParser) -> None:
    """--coder."""
    parser.add_argument(
        "--coder",
        default=Options.coder,
        choices=CODERS,
        help="what turns scalars into bits, fixed by calibration (default: %(default)s)",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """--cache-dtype and --fp8-scale."""
    add = parser.add_argument
    add(
        "--cache-dtype",
        choices=CACHE_FORMATS,
        help="dtype of the cache, and to run the target in unless it is FP8 (default: the model's own)",
    )
    add(
        "--fp8-scale",
        choices=FP8_SCALES,
        help=f"calibrated scales of an FP8 cache: none, one a tensor, or one a head (default: {DEFAULT_FP8_SCALE})",
    )
