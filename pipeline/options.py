"""What a job is asked to do: one frozen dataclass, checked before anything is read or written."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from codec import coders, profile
from codec.errors import UserError
from codec.formats import FORMATS
from codec.predictor import MODEL_FREE
from codec.predictor.config import KINDS, LIMITS
from codec.scales import SCALE_MODES

PREDICTORS = (*KINDS, *MODEL_FREE)
DEFAULT_PREDICTOR = "int8-a16"  # the fewest bits for what it costs, as measured by jobs/benchmark.py
LOOPS = profile.LOOPS
CODERS = coders.NAMES
CACHE_FORMATS = tuple(FORMATS)
FP8_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.coarse)
FP8_SCALES = SCALE_MODES
DEFAULT_FP8_SCALE = "tensor"
DEFAULT_KEEP = "1GB"  # of decoded prefixes, by a replica of the service
DEVICES = ("auto", "cpu", "cuda")
MAX_CHUNK_TOKENS = 65_536
MAX_BYTES = 2**63 - 1  # of any size that is given
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Verify:
    """Which of a run's new chunks are decoded again: a fraction of them, chosen by the hash in their keys."""

    fraction: float

    @staticmethod
    def parse(text: str) -> Verify:
        """Read `all`, `none` or `sample:F` with 0 < F <= 1.

        Raises:
            UserError: anything else.
        """
        if text == "all":
            return Verify(1.0)
        if text == "none":
            return Verify(0.0)
        try:
            fraction = float(text.removeprefix("sample:")) if text.startswith("sample:") else math.nan
        except ValueError:
            fraction = math.nan
        if not 0.0 < fraction <= 1.0:
            raise UserError(f"--verify {text!r} is none of all, none and sample:F with F above 0 and at most 1")
        return Verify(fraction)

    def selects(self, key: bytes) -> bool:
        """Whether the chunk of this key is in the sample; the same answer in every process and every run."""
        return int.from_bytes(key[:8], "big") < self.fraction * 2.0**64


@dataclass(frozen=True)
class Options:
    """Everything `jobs/compress_corpus.py` can be told; the names are those of its command line."""

    model: str
    corpus: str
    store: str
    predictor: str | None = None  # the default one; `linear` for architectures that no predictor is written for
    loop: str = "closed"
    coder: str = coders.DEFAULT
    window: int | None = None  # the last tokens that the predictor attends to one by one; None for all
    cache_dtype: str | None = None
    fp8_scale: str | None = None  # None: DEFAULT_FP8_SCALE where the cache is FP8
    chunk_tokens: int = 256
    lora: str | None = None
    calibration: str | None = None
    actors: int | None = None
    device: str = "auto"
    gpus_per_actor: float | None = None
    limit: int | None = None
    max_tokens: int | None = None
    skip_bad: bool = False
    salt_env: str | None = None
    verify: str = "all"
    dry_run: bool = False
    shared_fs: bool = False
    report: str | None = None
    max_store_bytes: str | None = None  # as a person writes it: 500GB

    def check(self) -> None:
        """Check every field on its own.

        Raises:
            UserError: the first field whose value cannot be.
        """
        if self.predictor is not None:
            _one_of("--predictor", self.predictor, PREDICTORS)
        _one_of("--loop", self.loop, LOOPS)
        _one_of("--coder", self.coder, CODERS)
        check_loop(self.predictor, self.loop, self.window)
        _one_of("--device", self.device, DEVICES)
        check_window(self.window)
        if self.cache_dtype is not None:
            _one_of("--cache-dtype", self.cache_dtype, CACHE_FORMATS)
        scale_mode(self.cache_dtype, self.fp8_scale)
        _between("--chunk-tokens", self.chunk_tokens, 1, MAX_CHUNK_TOKENS)
        for name, value in (("--actors", self.actors), ("--limit", self.limit), ("--max-tokens", self.max_tokens)):
            if value is not None:
                _between(name, value, 1, 2**31 - 1)
        self._check_gpus()
        Verify.parse(self.verify)
        self.salt()
        if self.max_store_bytes is not None:
            parse_bytes(self.max_store_bytes)
        if self.report is not None:
            check_file("--report", self.report)

    def _check_gpus(self) -> None:
        if self.gpus_per_actor is None:
            return
        if not (math.isfinite(self.gpus_per_actor) and self.gpus_per_actor > 0):
            raise UserError(f"--gpus-per-actor {self.gpus_per_actor} is no positive number")
        if self.gpus_per_actor > 1 and self.gpus_per_actor != int(self.gpus_per_actor):
            raise UserError(f"--gpus-per-actor {self.gpus_per_actor} is above 1 and must then be a whole number")
        if self.device == "cpu":
            raise UserError("--gpus-per-actor contradicts --device cpu; leave one of the two out")

    def salt(self) -> bytes:
        """Read the salt from the environment variable that --salt-env names; empty without one.

        Raises:
            UserError: the variable is unset or empty. The salt itself is never part of a message.
        """
        return read_salt(self.salt_env)


def read_salt(name: str | None, environment: Mapping[str, str] = os.environ) -> bytes:
    """The salt in the environment variable of that name; empty where there is no name.

    Raises UserError where the variable is unset or empty; the salt is in no message.
    """
    if name is None:
        return b""
    value = environment.get(name, "")
    if not value:
        raise UserError(f"the environment variable {name} that --salt-env names is unset or empty")
    return value.encode(errors="surrogateescape")  # as UTF-8; bytes that are no text as they are


def parse_bytes(text: str, flag: str = "--max-store-bytes", least: int = 1) -> int:
    """A size such as 500000, 200MB, 1.5GiB or 2T. Raises UserError, which names the flag."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip().lower())
    size = float(found[1]) * _SIZES[found[2] or ""] if found else math.nan
    if not least <= size <= MAX_BYTES:
        raise UserError(f"{text!r:.80} of {flag} is no size; write 500MB, 20GiB or 2T")
    return int(size)


def check_window(window: int | None) -> None:
    """Raise UserError for a window that cannot be; None is all tokens."""
    if window is not None:
        _between("--window", window, 1, LIMITS["context_length"])


def scale_mode(cache_dtype: str | None, fp8_scale: str | None) -> str:
    """How the scales of the cache are made, one of FP8_SCALES; "" where it is not FP8.

    Args:
        cache_dtype: what --cache-dtype says; None, a model's own dtype, is never FP8.

    Raises:
        UserError: --fp8-scale is unknown, or given for a cache without scales.
    """
    if fp8_scale is not None:
        _one_of("--fp8-scale", fp8_scale, FP8_SCALES)
    if cache_dtype in FP8_FORMATS:
        return fp8_scale or DEFAULT_FP8_SCALE
    if fp8_scale is not None:
        cache = f"--cache-dtype {cache_dtype}" if cache_dtype else "a cache in the model's own dtype"
        raise UserError(f"--fp8-scale does not go with {cache}; pass --cache-dtype {' or '.join(FP8_FORMATS)}")
    return ""


def check_loop(predictor: str | None, loop: str, window: int | None) -> None:
    """Raise UserError for a predictor that cannot work in that loop, or with a window."""
    if predictor in MODEL_FREE and loop != "closed":
        raise UserError(f"--predictor {predictor} guesses nothing from the tokens and needs --loop closed, not {loop}")
    if predictor in MODEL_FREE and window is not None:
        raise UserError(f"--predictor {predictor} attends to nothing; leave out --window {window}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} {value!r} is not known; choose {' or '.join(choices)}")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{name} {value} must be at least {low} and at most {high}")


def check_file(name: str, path: str) -> None:
    """Raise UserError where the option `name` gives a path at which no file can be written."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UserError(f"{name} {path}: the folder {folder} does not exist; make it first")
    if os.path.isdir(path):
        raise UserError(f"{name} {path} is a folder; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{name} {path}: the folder {folder} may not be written to")
