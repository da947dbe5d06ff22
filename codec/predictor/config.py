"""What a decoder's shape is, read from a Hugging Face config."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from codec.errors import PredictorError, UnsupportedArchitecture
from codec.predictor.rope import regime

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
HEAD_NORM = ("qwen3",)  # families that normalise each head of q and k before RoPE
QKV_BIAS = ("qwen2",)  # families whose q, k and v projections always have biases
MAX_CONTEXT = 1 << 17  # beyond, attention sums would need more bits than float64 holds exactly
KINDS = ("fp8", "int8", "int8-mixed", "int8-a16", "int4", "mxfp4")  # rungs of the ladder
SMOOTHED = (
    "int8",
    "int8-mixed",
)  # rungs that smoothing makes better: elsewhere it is the weights that have no range to spare
LIMBED = ("q", "o", "gate", "up", "down")  # projections whose activations int8-mixed gives one or two limbs
LIMITS = {
    "layers": 1024,
    "hidden": 1 << 17,
    "heads": 1024,
    "kv_heads": 1024,
    "head_dim": 1024,
    "intermediate": 1 << 18,
    "vocab": 1 << 22,
    "context_length": 1 << 24,
    "rope_dim": 1024,
}


def read_fields(text: str, kind: type[Any]) -> dict[str, Any]:
    """The fields of a stored configuration, a JSON object with exactly those of a dataclass. Raises PredictorError."""
    try:
        found = json.loads(text)
        kind(**found)
    except (TypeError, ValueError, RecursionError) as error:
        raise PredictorError(
            f"The predictor's configuration cannot be read ({error}); the file is corrupt or of another version."
        ) from None
    fields: dict[str, Any] = found
    return fields


@dataclass(frozen=True)
class PredictorConfig:
    """Shapes and constants of one decoder; everything that affects bits and is not a tensor."""

    kind: str  # the rung: how weights and activations are quantised
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    context_length: int
    rope_type: str
    rope_dim: int
    rope_scaling: float  # factor on cos and sin
    rope_bf16: bool  # the target rounds cos and sin to bf16
    exact_kv: bool  # K and V projections in full precision, for the closed loop
    window: int  # tokens that attention sees at least, the first few among them; 0 for all

    def form(self, projection: str, limbs: int = 1) -> str:
        """The number format of a projection (q, k, v, o, gate, up, down): one of `linear.FORMS`.

        limbs: of its activations, where the rung is int8-mixed; K and V always have two there.
        """
        if self.exact_kv and projection in ("k", "v"):
            return "int16"
        if self.kind == "int8-mixed":
            return "int8-a16" if limbs == 2 or projection in ("k", "v") else "int8"
        return self.kind

    def to_json(self) -> str:
        """Canonical text, part of the predictor's fingerprint."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PredictorConfig:
        """Parse and check; raises PredictorError."""
        config = cls(**read_fields(text, cls))
        config.check()
        return config

    def check(self) -> None:
        """Everything that a stored predictor must satisfy; raises PredictorError."""
        config = self
        for name, limit in LIMITS.items():
            value = getattr(config, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise PredictorError(f"The predictor's configuration says {name} = {value!r}; allowed is 1 to {limit}.")
        if type(config.window) is not int or not 0 <= config.window <= LIMITS["context_length"]:
            raise PredictorError(f"The predictor's configuration says window = {config.window!r}.")
        numbers = (config.norm_eps, config.rope_scaling)
        if (
            any(type(x) is not float or not math.isfinite(x) or not 2.0**-60 <= x <= 2.0**20 for x in numbers)
            or type(config.rope_bf16) is not bool
            or type(config.exact_kv) is not bool
        ):
            raise PredictorError(
                "The predictor's configuration has a constant that is no positive number, or one out of range."
            )
        if config.kind not in KINDS or config.family not in SUPPORTED or not isinstance(config.rope_type, str):
            raise PredictorError(
                f"The predictor is a '{config.kind}' of family '{config.family}', which this release does not know."
            )
        if config.heads % config.kv_heads or config.rope_dim % 2 or config.rope_dim > config.head_dim:
            raise PredictorError("The predictor's configuration contradicts itself (heads, kv_heads, rope_dim).")
        if config.exact_kv and config.head_dim % 2:
            raise PredictorError("The closed loop needs an even number of dimensions a head.")

    @property
    def head_norm(self) -> bool:
        """Whether each head of q and k is normalised before RoPE."""
        return self.family in HEAD_NORM

    @property
    def rope_regime(self) -> str:
        """See `codec.predictor.rope.regime`."""
        return regime(self.rope_type)


def from_hf(
    config: Mapping[str, Any], kind: str, rope: tuple[str, int, float], bf16: bool, exact_kv: bool, window: int = 0
) -> PredictorConfig:
    """Map a Hugging Face config (as a dict) of a supported family; `rope` is (type, rotated dims, scaling).

    Raises UnsupportedArchitecture, naming those that are supported.
    """
    family = check_family(config)
    heads = int(config["num_attention_heads"])
    shape = PredictorConfig(
        kind=kind, family=family, layers=int(config["num_hidden_layers"]), hidden=int(config["hidden_size"]), heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads), head_dim=head_dim(config),
        intermediate=int(config["intermediate_size"]), vocab=int(config["vocab_size"]), norm_eps=float(config["rms_norm_eps"]),
        context_length=min(int(config["max_position_embeddings"]), MAX_CONTEXT),
        rope_type=rope[0], rope_dim=rope[1], rope_scaling=rope[2], rope_bf16=bf16,
        exact_kv=exact_kv, window=window,
    )  # fmt: skip
    try:
        return PredictorConfig.from_json(shape.to_json())  # what could not be read back is not built either
    except PredictorError as error:
        raise UnsupportedArchitecture(f"No predictor can be built for this {family} model: {error}") from None


def check_family(config: Mapping[str, Any]) -> str:
    """The model family, or UnsupportedArchitecture naming what is supported."""
    family = str(config.get("model_type"))
    if family not in SUPPORTED:
        raise UnsupportedArchitecture(
            f"No predictor is written for model type '{family}'; supported are: {', '.join(SUPPORTED)}."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(
            f"Activation '{config['hidden_act']}' is not supported in a {family} model; supported is: silu."
        )
    return family


def head_dim(config: Mapping[str, Any]) -> int:
    """Dimensions of one attention head."""
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
