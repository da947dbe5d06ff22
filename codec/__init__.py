"""The codec: exact arithmetic, predictors, residual model, entropy coder and blob format. Pure: no Ray, no I/O.

>>> encoded = codec.encode(predictor, profile, state, token_ids, truth, identity)
>>> decoded = codec.decode(predictor, profile, other_state, token_ids, encoded.blob, identity)
"""

from codec.blob import BlobHeader, read_header
from codec.calibrate import (
    ClosedCalibration,
    Moments,
    calibrate_closed,
    fit_layers,
    freeze,
    freeze_closed,
    measure,
    sharpened,
    with_coder,
)
from codec.calibrate import Sample as ClosedSample
from codec.chunk import (
    ChunkIdentity,
    ChunkStats,
    DecodedChunk,
    DecodeTask,
    EncodedChunk,
    EncodeTask,
    decode,
    decode_batch,
    encode,
    encode_batch,
)
from codec.ideal import MISS, LayerCosts
from codec.joint_fit import LayerMoments
from codec.joint_model import JointLayer
from codec.keys import ROOT_DIGEST, chunk_keys, content_id, root_key
from codec.known_answer import check_known_answer
from codec.predictor import (
    CALIBRATED,
    ModelFree,
    Predictor,
    PredictorState,
    Ranges,
    build_model_free,
    build_pilot,
    build_predictor,
    fit_predictor,
    measure_ranges,
)
from codec.prefix import PrefixTask, decode_prefixes
from codec.profile import Profile
from codec.promise import promised_spread
from codec.scales import CacheScales

__all__ = [
    "CALIBRATED",
    "MISS",
    "ROOT_DIGEST",
    "BlobHeader",
    "CacheScales",
    "ChunkIdentity",
    "ChunkStats",
    "ClosedCalibration",
    "ClosedSample",
    "DecodeTask",
    "DecodedChunk",
    "EncodeTask",
    "EncodedChunk",
    "JointLayer",
    "LayerCosts",
    "LayerMoments",
    "ModelFree",
    "Moments",
    "Predictor",
    "PredictorState",
    "PrefixTask",
    "Profile",
    "Ranges",
    "build_model_free",
    "build_pilot",
    "build_predictor",
    "calibrate_closed",
    "check_known_answer",
    "chunk_keys",
    "content_id",
    "decode",
    "decode_batch",
    "decode_prefixes",
    "encode",
    "encode_batch",
    "fit_layers",
    "fit_predictor",
    "freeze",
    "freeze_closed",
    "measure",
    "measure_ranges",
    "promised_spread",
    "read_header",
    "root_key",
    "sharpened",
    "with_coder",
]
