"""The decoder forward pass in exact arithmetic: what every process that encodes or decodes computes alike (DESIGN 5).

Shapes: R rows are the new tokens of all sequences of a batch, one after another; heads H, key-value heads J, head dims D,
T new tokens of a sequence, S tokens it has seen including these. No row's result depends on another sequence, on how
many rows are computed at once, or on how a prompt is cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codec import exact
from codec.errors import PredictorError, UserError
from codec.predictor import fused, packed
from codec.predictor.attention import attend
from codec.predictor.base import Predictor, begins
from codec.predictor.config import LIMBED, PredictorConfig
from codec.predictor.far import centroids
from codec.predictor.kept import Stored, kept
from codec.predictor.linear import STORED_DTYPES, Inputs, Linear
from codec.predictor.memory import Memory, PredictorState, Seen, gathered, window_begin
from codec.predictor.rope import cos_sin, rotate

SMOOTH_LIMIT = 24  # a channel's smoothing scale is 2**-24 .. 2**24
_HIDDEN_LIMIT = 1e30
_FREQUENCY_LIMIT = 1024.0
_CHECKED_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 128  # of what is wider than the state: an MLP's rows take more memory than the cache of their tokens
# With scales and norms below this, no projection of a normalised row leaves float32: 2**9 * 2**20 * 2**18 * 2**9 * 2**20.
_NORMS = dict.fromkeys(("norm1", "norm2", "q_norm", "k_norm"), 2.0**20)
_LIMITS = {"scale": 2.0**20, "bias": 2.0**60} | _NORMS


@dataclass
class Layer:
    """One decoder layer's tensors."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    norm1: Tensor
    norm2: Tensor
    value_step: Tensor  # float32 [J, 1, 1], powers of two
    smooth: Tensor | None  # float32 [H * D], powers of two by which attention's output is multiplied
    q_norm: Tensor | None = None  # float32 [D], of families that normalise heads
    k_norm: Tensor | None = None


class DecoderPredictor(Predictor):
    """A decoder's quantised weights on one device."""

    config: PredictorConfig  # history stays 0: what earlier layers say is in the guesses

    def __init__(self, config: PredictorConfig, tensors: dict[str, Tensor], device: torch.device | str = "cpu") -> None:
        super().__init__(config, tensors, device)
        self._check()
        self.embed = tensors["embed"].to(self.device)
        self._inverse = tensors["rope.inverse"].to(self.device)
        self._starts: list[int] = tensors["rope.starts"].tolist()
        self.layers = [self._layer(i) for i in range(config.layers)]

    # ------------------------------------------------------------ use
    @property
    def context_length(self) -> int:
        """Tokens a prompt may have."""
        return self.config.context_length

    def run(
        self,
        states: Sequence[PredictorState],
        token_ids: Sequence[Tensor],
        *,
        after: Sequence[int | None] | None = None,
        keep: bool = True,
    ) -> DecoderRun:
        """See Predictor.run."""
        return DecoderRun(self, states, token_ids, after, keep)

    # ------------------------------------------------------------ set-up
    def _check(self) -> None:
        """Shapes, and that every reduction is exact; raises PredictorError or InexactBackend."""
        c = self.config
        c.check()
        widths = {"q": (c.heads * c.head_dim, c.hidden), "k": (c.kv_heads * c.head_dim, c.hidden), "v": (c.kv_heads * c.head_dim, c.hidden),
                  "o": (c.hidden, c.heads * c.head_dim), "gate": (c.intermediate, c.hidden), "up": (c.intermediate, c.hidden),
                  "down": (c.hidden, c.intermediate)}  # fmt: skip
        expected: dict[str, tuple[int, ...]] = {"embed": (c.vocab, c.hidden), "value_exponents": (c.layers, c.kv_heads)}
        for i in range(c.layers):
            for n, s in widths.items():
                expected |= self._weight_shapes(f"layers.{i}.{n}.", self.config.form(n), s)
            if (name := f"layers.{i}.smooth") in self._stored:
                expected[name] = widths["o"][1:]
            expected |= {f"layers.{i}.norm1": (c.hidden,), f"layers.{i}.norm2": (c.hidden,)}
            if c.head_norm:
                expected |= {f"layers.{i}.q_norm": (c.head_dim,), f"layers.{i}.k_norm": (c.head_dim,)}
            expected |= {k: s[:1] for n, s in widths.items() if (k := f"layers.{i}.{n}.bias") in self._stored}
        if c.kind == "int8-mixed":
            expected["limbs"] = (c.layers, len(LIMBED))
        regimes = self._stored["rope.starts"].numel() if "rope.starts" in self._stored else 1
        expected |= {"rope.starts": (regimes,), "rope.inverse": (regimes, c.rope_dim // 2)}
        self._check_shapes(expected)
        self._check_values()
        longest = max(c.hidden, c.intermediate, c.heads * c.head_dim)
        exact.bound("FP8 products", 2 * exact.E4M3_UNITS - 0.38, math.log2(longest))
        exact.bound("int8 products in int32", 14 + 22, math.log2(longest))
        exact.bound("16-bit products", 15 + 15, math.log2(longest))
        exact.bound("attention scores", 30, math.log2(c.head_dim))
        exact.bound("attention output", exact.PROBABILITY_BITS, 15, math.log2(c.context_length))
        if c.window:
            least = min(c.window, c.context_length)
            exact.bound("distances of keys", 32, math.log2(c.head_dim), math.log2(centroids(least) + 1))
        exact.bound("squares of a row", 30, math.log2(max(c.hidden, c.head_dim)))

    @staticmethod
    def _weight_shapes(name: str, form: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        scale = {name + "scale": shape[:1]}
        if form not in packed.FORMS:
            return scale | {name + "weight": shape}
        weight, shift = packed.stored_shapes(*shape)
        return scale | {name + "weight": weight, name + "shift": shift}

    def _check_shapes(self, expected: dict[str, tuple[int, ...]]) -> None:
        for name, shape in expected.items():
            got = self._stored.get(name)
            if got is None or tuple(got.shape) != shape or got.dtype not in self._dtypes(name):
                found = None if got is None else (tuple(got.shape), got.dtype)
                raise PredictorError(
                    f"The predictor's tensor '{name}' should have shape {shape} and a type of {self._dtypes(name)}; it has {found}."
                )
            if got.is_floating_point() and not _within(got, torch.finfo(torch.float32).max):
                raise PredictorError(
                    f"The predictor's tensor '{name}' holds a NaN or an infinity; the file is corrupt."
                )

    def _dtypes(self, name: str) -> tuple[torch.dtype, ...]:
        """The types that a stored tensor may have."""
        if name == "embed":
            return (torch.bfloat16, torch.float32)
        if name.endswith(".weight"):
            return (STORED_DTYPES[self.config.form(name.split(".")[-2])],)
        own = {"value_exponents": torch.int32, "rope.starts": torch.int64, "limbs": torch.int32, "smooth": torch.int32,
               "shift": torch.uint8}  # fmt: skip
        return (own.get(name, own.get(name.rpartition(".")[2], torch.float32)),)

    def _check_values(self) -> None:
        starts: list[int] = self._stored["rope.starts"].tolist()
        for name, tensor in self._stored.items():  # limbs of what is beyond would not fit int8
            if tensor.dtype == torch.int16 and int(tensor.to(torch.int32).abs().max()) > exact.ROW_MAX:
                raise PredictorError(f"The predictor's tensor '{name}' is out of range; the file is corrupt.")
        if (
            not starts
            or starts[0] != 0
            or starts != sorted(set(starts))
            or bool((self._stored["value_exponents"].clamp(-60, 60) != self._stored["value_exponents"]).any())
            or bool((self._stored["rope.inverse"].clamp(0.0, _FREQUENCY_LIMIT) != self._stored["rope.inverse"]).any())
        ):
            raise PredictorError(
                "The predictor's rotary regimes or value exponents are out of range; the file is corrupt."
            )
        self._check_choices()
        for name, tensor in self._stored.items():
            if tensor.dtype == torch.int16:
                limit: float = exact.ROW_MAX
            elif tensor.dtype == torch.float32:
                limit = _LIMITS.get(name.rpartition(".")[2], _HIDDEN_LIMIT)
            else:
                continue
            if not _within(tensor, limit):
                raise PredictorError(
                    f"The predictor's tensor '{name}' holds a value beyond {limit:g}; it cannot be computed with."
                )

    def _check_choices(self) -> None:
        """What calibration chose: limbs and smoothing scales."""
        limbs = self._stored.get("limbs")
        if limbs is not None and bool(((limbs != 1) & (limbs != 2)).any()):
            raise PredictorError("The predictor's limbs are neither 1 nor 2; the file is corrupt.")
        for i in range(self.config.layers):
            smooth = self._stored.get(f"layers.{i}.smooth")
            if smooth is not None and bool((smooth.clamp(-SMOOTH_LIMIT, SMOOTH_LIMIT) != smooth).any()):
                raise PredictorError(f"The predictor's smoothing of layer {i} is out of range; the file is corrupt.")

    def _layer(self, i: int) -> Layer:
        t, name, c = self._stored, f"layers.{i}.", self.config
        limbs = dict(zip(LIMBED, t["limbs"][i].tolist(), strict=True)) if c.kind == "int8-mixed" else {}

        def linear(n: str) -> Linear:
            form, bias, weight = c.form(n, limbs.get(n, 1)), t.get(f"{name}{n}.bias"), t[f"{name}{n}.weight"]
            if form in packed.FORMS:
                width = {"o": c.heads * c.head_dim, "down": c.intermediate}.get(n, c.hidden)
                weight = packed.unpack(f"{name}{n}.weight", form, weight, t[f"{name}{n}.shift"], width)
            bias = None if bias is None else bias.to(self.device)
            return Linear(form, weight.to(self.device), t[f"{name}{n}.scale"].to(self.device), bias)

        step = exact.pow2(t["value_exponents"][i].to(torch.int32))[:, None, None].to(self.device)
        norm1, norm2 = (t[name + n].to(self.device) for n in ("norm1", "norm2"))
        heads = [t[name + n].to(self.device) for n in ("q_norm", "k_norm")] if self.config.head_norm else []
        q, k, v, o = linear("q"), linear("k"), linear("v"), linear("o")
        smooth = t.get(name + "smooth")
        smooth = None if smooth is None else exact.pow2(-smooth).to(self.device)
        return Layer(q, k, v, o, linear("gate"), linear("up"), linear("down"), norm1, norm2, step, smooth, *heads)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of int64 positions [R] as the target uses them: float32 [R, rope_dim / 2] each."""
        return cos_sin(self._inverse, self._starts, positions, self.config.rope_scaling, self.config.rope_bf16)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles themselves, neither scaled nor rounded further: a rotation."""
        return cos_sin(self._inverse, self._starts, positions, 1.0, False)


class DecoderRun:
    """One forward pass over the new tokens of a batch, a layer at a time: guess(0), advance(0, kv), guess(1), …, commit().

    `advance` is told which K and V attention is to use: the guesses themselves (open loop) or what was decoded (closed loop).
    States change only in `commit`, so a pass that fails leaves them as they were. Without `keep` a layer's K and V are let go as soon
    as the layer is done, and there is nothing to commit.
    """

    def __init__(
        self,
        predictor: DecoderPredictor,
        states: Sequence[PredictorState],
        token_ids: Sequence[Tensor],
        after: Sequence[int | None] | None = None,
        keep: bool = True,
    ) -> None:
        self.p, self.c, self._keep = predictor, predictor.config, keep
        self.states, self.lengths = list(states), [len(t) for t in token_ids]
        self._after = list(after or [None] * len(self.states))
        self._begins = begins([s.length for s in states], self.lengths, self._after)
        if len({id(s) for s in states}) < len(states):
            raise ValueError("A state cannot be in one batch twice.")
        for begin, n in zip(self._begins, self.lengths, strict=True):
            if begin + n > self.c.context_length:
                raise UserError(
                    f"A prompt of {begin + n} tokens is over the model's context length of {self.c.context_length}."
                )
        ids = torch.cat([t.to(predictor.device, torch.int64) for t in token_ids])
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.c.vocab):
            raise UserError(f"Token ids must be 0 to {self.c.vocab - 1}; found {int(ids.min())} to {int(ids.max())}.")
        places = [
            torch.arange(begin, begin + n, device=predictor.device)
            for begin, n in zip(self._begins, self.lengths, strict=True)
        ]
        self.cos, self.sin = predictor.rope(torch.cat(places))
        self._places = places
        self._turns: list[tuple[Tensor, Tensor]] | None = None
        self.h = predictor.embed[ids].to(torch.float32)  # [R, hidden]
        self.seen: list[list[Memory]] = []  # a layer: a sequence
        self.x: Inputs | None = None  # the layer's normalised input
        self.watch: Callable[[int, str, Tensor], None] | None = (
            None  # told layer, name and rows of every input of linear layers
        )
        self.rms = self.h[:, :1]

    def guess(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Guessed K and V of a layer, float32 [J, T, D] each, for every sequence."""
        w = self.p.layers[layer]
        x, self.rms = self._norm(self.h, w.norm1)
        self.x = self._inputs(layer, "norm1", x)
        k = self._turned(w.k(self.x), self.c.kv_heads, w.k_norm)
        v = self._heads(w.v(self.x), self.c.kv_heads)
        return list(zip(k.split_with_sizes(self.lengths, 1), v.split_with_sizes(self.lengths, 1), strict=True))

    def advance(
        self, layer: int, kv: Sequence[tuple[Tensor, Tensor]], corrections: Sequence[Tensor] | None = None,
        stored: Sequence[Stored | None] | None = None,
    ) -> None:  # fmt: skip
        """Go on to the next layer, with attention over these K and V (finite float32 [J, T, D]) and all earlier ones.

        corrections: float32 [T, hidden] a sequence, in units of the state's RMS: added to the hidden state before q is computed.
        stored: see Run.advance.
        """
        w = self.p.layers[layer]
        if corrections is not None:
            moved = torch.mul(
                exact.cat(corrections, 0), self.rms, out=exact.empty(self.h.shape, torch.float32, self.h.device)
            )
            self.h = moved.add_(self.h).clamp_(-_HIDDEN_LIMIT, _HIDDEN_LIMIT)
            self.x = Inputs(self._norm(self.h, w.norm1)[0])
        self.h, seen = self.output(w, layer, kv)
        if self._keep:
            self.seen.append(seen if stored is None else self._held(layer, w, seen, kv, stored))
        self.x = None

    def _held(
        self, layer: int, w: Layer, seen: Sequence[Memory], kv: Sequence[tuple[Tensor, Tensor]], stored: Sequence[Stored | None]
    ) -> list[Memory]:  # fmt: skip
        """What sequences have seen, by the stored K and V where they are given and follow whole pieces."""
        out = list(seen)
        for number, (pair, given) in enumerate(zip(kv, stored, strict=True)):
            before = self._before(layer, number, out)
            if given is None or before.joins:
                continue
            piece = kept(given, pair, w.value_step)
            if piece is not None:
                out[number] = replace(before.then(piece), far=seen[number].far)
        return out

    def output(self, w: Layer, layer: int, kv: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Memory]]:
        """The state after a layer with weights w, float32 [R, hidden], and what its attention saw; the run stays as it is."""
        assert self.x is not None, "guess(layer) comes before advance(layer)"
        seen: list[Memory] = []
        for number, (k, v) in enumerate(kv):
            new = self._before(layer, number, seen).then(Seen.of(k, v, w.value_step))
            seen.append(new.with_far(self.c.window))
        attended, h = self._attended(w, self.x, seen), exact.empty(self.h.shape, torch.float32, self.h.device)
        for begin in range(0, len(h), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            h[rows] = self._projected(w, layer, self.h[rows], attended[rows])
        return h, seen

    def _attended(self, w: Layer, x: Inputs, seen: Sequence[Memory]) -> Tensor:
        """What attention gives: float32 [R, H * D]."""
        q = self._turned(w.q(x), self.c.heads, w.q_norm)  # [H, R, D]
        parts = zip(q.split_with_sizes(self.lengths, 1), seen, self._begins, strict=True)
        window, step = self.c.window, w.value_step
        return exact.cat(
            [attend(part, s.seen(window_begin(begin, window)), step, window) for part, s, begin in parts], 0
        )

    def _before(self, layer: int, number: int, seen: Sequence[Memory]) -> Memory:
        """What a sequence's new tokens follow in this layer. seen: what the sequences before it have seen."""
        after, state = self._after[number], self.states[number]
        if after is not None:
            return seen[after]
        return state.layers[layer] if state.length else Memory()

    def _projected(self, w: Layer, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        """Some rows of the state after a layer, from those before it and what attention gave them [rows, H * D]."""
        if w.smooth is not None:
            attended = attended * w.smooth
        # What _LIMITS says is of normalised rows; these are as large as values, value exponents and smoothing make them.
        h = w.o(self._inputs(layer, "attention", attended)).add_(h).clamp_(-_HIDDEN_LIMIT, _HIDDEN_LIMIT)
        x = self._inputs(layer, "norm2", self._norm(h, w.norm2)[0])
        y = self._gated(w.gate(x), w.up(x))
        return w.down(self._inputs(layer, "mlp", y)).add_(h).clamp_(-_HIDDEN_LIMIT, _HIDDEN_LIMIT)

    def turns(self) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of every sequence's new tokens, float32 [T, rope_dim / 2] each: what un-rotates K."""
        if self._turns is None:
            self._turns = [self.p.turn(places) for places in self._places]
        return self._turns

    def commit(self) -> None:
        """Make the new tokens part of the states; every layer but the last must have been advanced."""
        if len(self.seen) < self.c.layers - 1:
            raise ValueError(f"Only {len(self.seen)} of {self.c.layers - 1} layers were advanced.")
        for i, (state, begin, n) in enumerate(zip(self.states, self._begins, self.lengths, strict=True)):
            state.layers = gathered([seen[i] for seen in self.seen[: self.c.layers - 1]])
            if state.forgets and self.c.window and begin + n:
                state.layers = [memory.without_groups(self.c.window) for memory in state.layers]
            state.length = begin + n

    # ------------------------------------------------------------ parts
    def _inputs(self, layer: int, name: str, x: Tensor) -> Inputs:
        if self.watch is not None:
            self.watch(layer, name, x)
        return Inputs(x)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[R, heads * D] -> [heads, R, D]"""
        return x.view(len(x), heads, self.c.head_dim).transpose(0, 1)

    def _turned(self, x: Tensor, heads: int, norm: Tensor | None) -> Tensor:
        """q or k as projected, [R, heads * D], to normalised where the family does so and rotated [heads, R, D]."""
        x = self._heads(x, heads)
        return rotate(x if norm is None else self._norm(x, norm)[0], self.cos, self.sin)

    def _norm(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """RMS norm over the last axis, and the RMS [..., 1]: squares summed as integers of the row's own scale."""
        if fused.serves(x.device):
            return fused.norm(x, weight, self.c.norm_eps)
        q, scale = exact.row_integers(x)
        wide, step = q.to(torch.float64), scale.to(torch.float64)
        mean = exact.row_sum(wide * wide) * (1.0 / x.shape[-1]) * (step * step)  # exact: a constant, one rounding
        rms = torch.sqrt(mean + self.c.norm_eps).to(torch.float32)
        return (x / rms) * weight, rms

    @staticmethod
    def _gated(gate: Tensor, up: Tensor) -> Tensor:
        if fused.serves(gate.device):
            return fused.gated(gate, up, _HIDDEN_LIMIT)
        return (exact.silu(gate) * up).clamp(-_HIDDEN_LIMIT, _HIDDEN_LIMIT)


def _within(tensor: Tensor, limit: float) -> bool:
    """Whether no value is beyond a limit or NaN; looked at in parts, as the whole in float64 would take several times its memory."""
    values = tensor.reshape(-1)
    parts = (values[at : at + _CHECKED_AT_ONCE] for at in range(0, len(values), _CHECKED_AT_ONCE))
    return all(bool((part.to(torch.float64).abs() <= limit).all()) for part in parts)
