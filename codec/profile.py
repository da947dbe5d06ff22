"""The profile: calibration frozen into integers. Versioned, content-addressed, all that a blob's decoding depends on but the predictor.

Stored as safetensors with one metadata entry, `profile`: canonical JSON. Its id is the BLAKE2b digest of these bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import numpy as np
import safetensors
import safetensors.numpy

from codec.cells import Ints
from codec.entropy import BACKEND
from codec.errors import ProfileError
from codec.formats import NumberFormat, number_format
from codec.keys import content_id
from codec.residual import TABLE_BITS, TABLE_REACH, CellModel, ChannelScales

PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 1 << 30


@dataclass(frozen=True)
class ProfileFacts:
    """What a profile says in words; ids and digests are hexadecimal."""

    target: str
    predictor: str
    cache_format: str
    loop: str
    prefill_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    calibration_tokens: int
    known_answer: str = ""
    coder: str = BACKEND
    version: int = PROFILE_VERSION


@dataclass(frozen=True)
class Profile:
    """A frozen profile. grid int16, reciprocal int32: [layers, 2 (K, V), kv_heads, head_dim]; table int64."""

    facts: ProfileFacts
    grid: np.ndarray
    reciprocal: np.ndarray
    table: Ints
    _model: CellModel | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def format(self) -> NumberFormat:
        """The cache's number format."""
        return number_format(self.facts.cache_format)

    @property
    def cache_format(self) -> str:
        """The name of the cache's number format."""
        return self.facts.cache_format

    @property
    def loop(self) -> str:
        """ "open": the predictor never sees decoded values."""
        return self.facts.loop

    @property
    def prefill_tokens(self) -> int:
        """Tokens the target took at a time when it was calibrated."""
        return self.facts.prefill_tokens

    @property
    def target(self) -> bytes:
        """Fingerprint of the target it was calibrated for."""
        return bytes.fromhex(self.facts.target)

    @property
    def predictor(self) -> bytes:
        """Fingerprint of the predictor it was calibrated with."""
        return bytes.fromhex(self.facts.predictor)

    @property
    def model(self) -> CellModel:
        """The cell model over this profile's table."""
        if self._model is None:
            object.__setattr__(self, "_model", CellModel(self.table, self.format))
        assert self._model is not None
        return self._model

    def scales(self, layer: int, tensor: int) -> ChannelScales:
        """Scales of K (tensor 0) or V (1) of a layer."""
        grid = self.grid[layer, tensor].astype(np.int64)[:, None, :]
        return ChannelScales(grid, self.reciprocal[layer, tensor].astype(np.int64)[:, None, :])

    def to_bytes(self) -> bytes:
        """Canonical bytes."""
        facts = json.dumps(asdict(self.facts), sort_keys=True, separators=(",", ":"))
        tensors = {
            "grid": self.grid.astype("<i2"),
            "reciprocal": self.reciprocal.astype("<i4"),
            "table": self.table.astype("<i8"),
        }
        data: bytes = safetensors.numpy.save(tensors, {"profile": facts})
        return data

    @property
    def id(self) -> bytes:
        """BLAKE2b-256 of the canonical bytes."""
        return content_id(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Parse and check every bound the coder relies on. Raises ProfileError."""
        if len(data) > MAX_PROFILE_BYTES:
            raise ProfileError(f"A profile of {len(data)} bytes is over the limit of {MAX_PROFILE_BYTES}.")
        try:
            tensors = safetensors.numpy.load(data)
            length = int.from_bytes(data[:8], "little")
            facts = ProfileFacts(**json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["profile"]))
            profile = cls(facts, tensors["grid"], tensors["reciprocal"], tensors["table"])
            profile._check()
            if profile.to_bytes() != data:  # else its id would not be that of the stored bytes
                raise ProfileError(
                    "The stored profile is not in canonical form; it is corrupt or was not written by this codec."
                )
        except ProfileError:
            raise
        except Exception as error:  # a hostile file can fail in many ways inside the parsers
            raise ProfileError(
                f"The stored profile cannot be read ({type(error).__name__}: {error}); it is corrupt or of another version."
            ) from None
        return profile

    def _check(self) -> None:
        f, fmt = self.facts, self.format
        if f.version != PROFILE_VERSION:
            raise ProfileError(f"The profile has version {f.version}; this release reads version {PROFILE_VERSION}.")
        if f.coder != BACKEND:
            raise ProfileError(
                f"The profile was made for coder '{f.coder}'; this installation has '{BACKEND}', which codes other bits."
            )
        ids = ((f.target, 32), (f.predictor, 32), (f.known_answer, 16))
        if any(len(bytes.fromhex(text)) != size for text, size in ids if text or size == 32) or f.loop != "open":
            raise ProfileError("The profile's ids or its loop are malformed; it is corrupt or of another version.")
        shape = (f.layers, 2, f.kv_heads, f.head_dim)
        if (
            self.grid.shape != shape
            or self.reciprocal.shape != shape
            or self.grid.dtype != np.int16
            or self.reciprocal.dtype != np.int32
        ):
            raise ProfileError(f"The profile's scales do not have the shape {shape} that it states.")
        top = (fmt.first_nonfinite >> fmt.mantissa) + fmt.emin - 2 - fmt.mantissa
        if (
            self.grid.min() < fmt.emin
            or self.grid.max() > top
            or self.reciprocal.min() < 1
            or self.reciprocal.max() > 1 << 20
        ):
            raise ProfileError("The profile's scales are out of range.")
        table = self.table
        if (
            table.dtype != np.int64
            or table.shape != (2 * TABLE_REACH + 1,)
            or table[0] != 0
            or table[-1] != 1 << TABLE_BITS
            or bool((np.diff(table) < 0).any())
        ):
            raise ProfileError("The profile's table of probabilities is malformed.")
