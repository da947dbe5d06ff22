"""The predictor: a cheaper computation that guesses the target's cache from the tokens, in exact arithmetic."""

from codec.predictor.build import build_predictor
from codec.predictor.decoder import Predictor, PredictorState, Run

__all__ = ["Predictor", "PredictorState", "Run", "build_predictor"]
