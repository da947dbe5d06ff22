"""The profile: calibration frozen into integers. Versioned, content-addressed, all that decoding depends on but the predictor.

Stored as safetensors with one metadata entry, `profile`: canonical JSON. Its id is the BLAKE2b digest of these bytes. Which
tensors it holds depends on the loop; `table` (int64) is the cumulative normal distribution of codec.residual in both.

    open    grid int16, reciprocal int32  [layers, 2 (K, V), kv_heads, head_dim]
    closed  step, unit int8 [layers, N]; coefficient int16 [layers, N (N - 1) / 2] (rows of the lower triangle); bias, sigma float32
            [layers, N]; inside float32 [layers, P]; gain int8 [layers, M, N]; gain_unit int8 [layers, M]; of a fine cache scale
            int16 [layers, blocks, 4] (codec.token_scale); where the model looks back also given int8 [layers, N, G] and
            given_unit int8 [layers, N]  (codec.joint_model)
    of an FP8 cache also scales float32 [layers, 2, kv_heads]; in the closed loop density int64 (codec.bins) and narrow float32
            [layers, N] (codec.narrow)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from codec import token_scale
from codec.bins import Bins
from codec.closed_loop import ClosedLoop
from codec.coders import DEFAULT, NAMES, Coder
from codec.errors import DataError, ProfileError
from codec.formats import NumberFormat, number_format
from codec.joint_model import COEFFICIENT_MAX, JointLayer
from codec.keys import content_id
from codec.loop import LoopCodec, OpenLoop
from codec.residual import TABLE_BITS, TABLE_REACH, ChannelScales, grid_limit
from codec.scales import SCALE_MODES, CacheScales

PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 4 << 30
MAX_HISTORY = 4
LOOPS = ("open", "closed")
Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class ProfileFacts:
    """What a profile says in words; ids and digests are hexadecimal."""

    target: str
    predictor: str
    cache_format: str
    loop: str
    prefill_tokens: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    calibration_tokens: int
    history: int = 0  # layers back that joint models look
    scale_mode: str = ""  # of an FP8 cache: see codec.scales
    known_answer: str = ""
    coder: str = DEFAULT
    version: int = PROFILE_VERSION


@dataclass(frozen=True)
class Profile:
    """A frozen profile: facts and the loop's tensors."""

    facts: ProfileFacts
    tensors: Arrays

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
        """ "open": the predictor never sees decoded values; "closed": it does."""
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

    def sizes(self, tokens: int) -> tuple[int, int]:
        """Of a chunk of so many tokens: its layers, and how many scalars each has, K and V."""
        f = self.facts
        return f.layers, 2 * f.kv_heads * f.head_dim * tokens

    @cached_property
    def coder(self) -> Coder:
        """What turns scalars under their laws into bitstreams."""
        return Coder(self.facts.coder, self.tensors["table"].astype(np.int64), self.format)

    @cached_property
    def scales(self) -> CacheScales | None:
        """The scales of an FP8 cache, or None."""
        values = self.tensors.get("scales")
        return None if values is None else CacheScales(self.facts.scale_mode, values.astype(np.float32))

    @cached_property
    def loop_codec(self) -> LoopCodec:
        """What codes layers under this profile."""
        factors = None if self.scales is None else self.scales.values.astype(np.float64)
        if self.loop == "closed":
            layers = [self._joint_layer(i) for i in range(self.facts.layers)]
            bins = None
            if self.format.coarse:
                table, density = (self.tensors[name].astype(np.int64) for name in ("table", "density"))
                bins = Bins(table, density, self.format)
            history = self.facts.history
            return ClosedLoop(layers, self.facts.rope_dim, self.format, history=history, scales=factors, bins=bins)
        scales = [(self._scales(i, 0), self._scales(i, 1)) for i in range(self.facts.layers)]
        return OpenLoop(scales, self.format, factors)

    def _scales(self, layer: int, tensor: int) -> ChannelScales:
        grid, reciprocal = (self.tensors[n][layer, tensor].astype(np.int64)[:, None, :] for n in ("grid", "reciprocal"))
        return ChannelScales(grid, reciprocal)

    def _joint_layer(self, i: int) -> JointLayer:
        t = self.tensors
        n = t["step"].shape[1]
        coefficient = np.zeros((n, n), np.int16)
        coefficient[np.tril_indices(n, -1)] = t["coefficient"][i]
        integers: dict[str, Any] = {k: t[k][i].astype(np.int64) for k in ("step", "unit", "gain_unit")}
        stored: dict[str, Any] = {k: t[k][i] for k in ("bias", "sigma", "inside", "gain")}
        given, given_unit = np.zeros((n, 0), np.int8), np.zeros(n, np.int64)
        if self.facts.history:
            given, given_unit = t["given"][i], t["given_unit"][i].astype(np.int64)
        stored |= {k: t[k][i] for k in ("scale", "narrow") if k in t}
        return JointLayer(coefficient=coefficient, given=given, given_unit=given_unit, **(stored | integers))

    def to_bytes(self) -> bytes:
        """Canonical bytes."""
        facts = json.dumps(asdict(self.facts), sort_keys=True, separators=(",", ":"))
        tensors = {name: np.ascontiguousarray(t, dtype=t.dtype.newbyteorder("<")) for name, t in self.tensors.items()}
        data: bytes = safetensors.numpy.save(tensors, {"profile": facts})
        return data

    @cached_property
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
            profile = cls(facts, tensors)
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
        f = self.facts
        if f.version != PROFILE_VERSION:
            raise ProfileError(f"The profile has version {f.version}; this release reads version {PROFILE_VERSION}.")
        if f.coder not in NAMES:
            raise ProfileError(
                f"The profile was made for coder '{f.coder}'; this installation has {' and '.join(NAMES)}, which code other bits."
            )
        if f.loop not in LOOPS:
            raise ProfileError(f"The profile is for loop '{f.loop}'; this release knows {', '.join(LOOPS)}.")
        self._check_facts()
        ids = ((f.target, 32), (f.predictor, 32), (f.known_answer, 16))
        if any(len(bytes.fromhex(text)) != size for text, size in ids if text or size == 32):
            raise ProfileError("The profile's ids are malformed; it is corrupt or of another version.")
        table = self.tensors.get("table", np.zeros(0))
        if table.shape != (2 * TABLE_REACH + 1,) or table.dtype != np.int64 or not _is_distribution(table):
            raise ProfileError("The profile's table of probabilities is malformed.")
        layout = self._layout()
        if set(self.tensors) != {"table", *layout}:
            raise ProfileError(f"The profile's tensors are {', '.join(sorted(self.tensors))}; its loop needs others.")
        for name, (shape, dtype) in layout.items():
            got = self.tensors[name]
            if got.shape != shape or got.dtype != dtype:
                raise ProfileError(
                    f"The profile's tensor '{name}' is {got.dtype} {got.shape}; it must be {dtype} {shape}."
                )
        (self._check_open if f.loop == "open" else self._check_closed)()
        if self.format.coarse:
            self._check_coarse()

    def _check_facts(self) -> None:
        f = self.facts
        sizes = (f.layers, f.kv_heads, f.head_dim, f.prefill_tokens, f.calibration_tokens)
        some = (f.hidden, f.rope_dim)  # 0 without a hidden state, or without rotation
        if any(type(n) is not int for n in sizes + some) or min(sizes) < 1 or min(some) < 0:
            raise ProfileError("The profile's sizes are no positive numbers.")
        # A closed loop takes a head's channels in pairs (codec/geometry.py).
        if f.rope_dim > f.head_dim or f.rope_dim % 2 or (f.loop == "closed" and f.head_dim % 2):
            raise ProfileError("The profile's sizes contradict each other.")
        if type(f.history) is not int or not 0 <= f.history <= MAX_HISTORY or (f.history and f.loop != "closed"):
            raise ProfileError(f"The profile looks back {f.history!r} layers; this release knows 0 to {MAX_HISTORY}.")
        if (f.scale_mode in SCALE_MODES) != self.format.coarse or (not self.format.coarse and f.scale_mode != ""):
            raise ProfileError(f"The profile's scale mode '{f.scale_mode}' does not fit a {f.cache_format} cache.")

    def _layout(self) -> dict[str, tuple[tuple[int, ...], type]]:
        f, more = self.facts, dict[str, tuple[tuple[int, ...], type]]()
        if self.format.coarse:
            more["scales"] = ((f.layers, 2, f.kv_heads), np.float32)
            if f.loop == "closed":
                more["density"] = ((2 * TABLE_REACH + 1,), np.int64)
        if f.loop == "open":
            shape = (f.layers, 2, f.kv_heads, f.head_dim)
            return {"grid": (shape, np.int16), "reciprocal": (shape, np.int32), **more}
        n = 2 * f.kv_heads * f.head_dim
        if self.format.coarse:
            more["narrow"] = ((f.layers, n), np.float32)
        else:
            more["scale"] = ((f.layers, -(-n // token_scale.BLOCK), token_scale.TERMS), np.int16)
        if f.history:
            more |= {"given": ((f.layers, n, f.history * n), np.int8), "given_unit": ((f.layers, n), np.int8)}
        return more | {
            "step": ((f.layers, n), np.int8),
            "unit": ((f.layers, n), np.int8),
            "coefficient": ((f.layers, n * (n - 1) // 2), np.int16),
            "bias": ((f.layers, n), np.float32),
            "sigma": ((f.layers, n), np.float32),
            "inside": ((f.layers, n // 4), np.float32),
            "gain": ((f.layers, f.hidden, n), np.int8),
            "gain_unit": ((f.layers, f.hidden), np.int8),
        }

    def _check_open(self) -> None:
        grid, reciprocal = self.tensors["grid"], self.tensors["reciprocal"]
        if int(grid.min()) < self.format.emin or int(grid.max()) > grid_limit(self.format):
            raise ProfileError("The profile's grid exponents are out of range.")
        if int(reciprocal.min()) < 1 or int(reciprocal.max()) > 1 << 20:
            raise ProfileError("The profile's reciprocals are out of range.")

    def _check_closed(self) -> None:
        for name in ("bias", "sigma", "inside", *(["narrow"] if self.format.coarse else [])):
            if not bool(np.isfinite(self.tensors[name]).all()) or float(np.abs(self.tensors[name]).max()) > 2.0**60:
                raise ProfileError(f"The profile's tensor '{name}' is out of range.")
        if min(float(self.tensors[name].min()) for name in ("sigma", "narrow") if name in self.tensors) < 2.0**-30:
            raise ProfileError("The profile has a standard deviation that is not positive.")
        if max(map(abs, _ends(self.tensors["coefficient"]))) > COEFFICIENT_MAX:
            raise ProfileError(f"The profile has a coefficient beyond {COEFFICIENT_MAX}.")
        n = self.tensors["step"].shape[1]
        second = np.arange(n // 2 + 1, n, 2)  # row j of the triangle ends at j (j + 1) / 2; its last is (j, j - 1)
        if bool(self.tensors["coefficient"][:, second * (second + 1) // 2 - 1].any()):
            raise ProfileError("The profile has a coefficient between the two channels of a pair.")

    def _check_coarse(self) -> None:
        density = self.tensors.get("density", np.zeros(1, np.int64))
        if int(density.min()) < 0 or int(density.max()) > 1 << TABLE_BITS:
            raise ProfileError("The profile's table of densities is malformed.")
        assert self.scales is not None
        try:
            CacheScales.from_bytes(self.scales.to_bytes())
        except DataError as error:
            raise ProfileError(f"The profile's scales are malformed: {error}") from None


def _ends(values: NDArray[np.generic]) -> tuple[int, int]:
    """The smallest and the largest of integers, or of nothing 0."""
    return int(values.min(initial=0)), int(values.max(initial=0))


def _is_distribution(table: NDArray[np.generic]) -> bool:
    values = table.astype(np.int64)  # compared, not subtracted: differences may overflow
    return int(values[0]) == 0 and int(values[-1]) == 1 << TABLE_BITS and bool((values[1:] >= values[:-1]).all())
