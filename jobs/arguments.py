"""Options of command lines that several jobs share: how the predictor guesses, what the cache is, a store, a time."""

from __future__ import annotations

import argparse
import math
import re

from pipeline.options import CACHE_FORMATS, CODERS, DEFAULT_FP8_SCALE, FP8_SCALES, LOOPS, Options

GRACE = 24 * 3600.0  # seconds
LONGEST = 1e9  # seconds: 31 years, which clocks and timers take
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """A time such as 90, 90s, 15m, 24h or 7d, in seconds; argparse turns what this raises into a usage error."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip().lower())
    value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no time; write 90s, 15m, 24h or 7d")
    return value


def bandwidth(text: str) -> float:
    """A bandwidth such as 100Mb/s, 1Gb/s or 2.5G, in bits a second; argparse turns what this raises into a usage error."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt])?(?:b(?:it)?(?:/s|ps)?)?", text.strip().lower())
    value = float(found[1]) * 1000 ** " kmgt".index(found[2] or " ") if found else 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no bandwidth; write 100Mb/s, 1Gb/s or 10Gb/s")
    return value


def device(text: str) -> str:
    """A device of torch's that decodes: cpu, cuda or cuda:1; argparse turns what this raises into a usage error."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no device; write cpu, cuda or cuda:1")
    return text


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store, of a store that exists."""
    parser.add_argument("--store", required=True, metavar="URI", help="the store: a folder or s3://bucket/prefix")


def add_lora(parser: argparse.ArgumentParser) -> None:
    """--lora."""
    parser.add_argument(
        "--lora", metavar="FOLDER", help="a LoRA adapter (safetensors) to merge into the model's weights"
    )


def add_log(parser: argparse.ArgumentParser) -> None:
    """--log-json."""
    parser.add_argument(
        "--log-json", action="store_true", help="say on standard error what happens as JSON, an object a line"
    )


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
