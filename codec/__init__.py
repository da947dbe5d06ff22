"""The codec: exact arithmetic, predictors, residual model, entropy coder and blob format. Pure: no Ray, no I/O.

>>> encoded = codec.encode(predictor, profile, state, token_ids, truth, identity)
>>> decoded = codec.decode(predictor, profile, other_state, token_ids, encoded.blob, identity)
"""

from codec.blob import BlobHeader, read_header
from codec.calibrate import Moments, check_known_answer, freeze, measure
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
from codec.keys import ROOT_DIGEST, chunk_keys, content_id, root_key
from codec.predictor import Predictor, PredictorState, build_predictor
from codec.profile import Profile

__all__ = [
    "ROOT_DIGEST",
    "BlobHeader",
    "ChunkIdentity",
    "ChunkStats",
    "DecodeTask",
    "DecodedChunk",
    "EncodeTask",
    "EncodedChunk",
    "Moments",
    "Predictor",
    "PredictorState",
    "Profile",
    "build_predictor",
    "check_known_answer",
    "chunk_keys",
    "content_id",
    "decode",
    "decode_batch",
    "encode",
    "encode_batch",
    "freeze",
    "measure",
    "read_header",
    "root_key",
]
