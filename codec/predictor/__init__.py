"""The predictor: a cheaper computation that guesses the target's cache from the tokens, in exact arithmetic."""

from codec.predictor.build import build_predictor
from codec.predictor.decoder import Predictor, PredictorState, Run
from codec.predictor.fit import CALIBRATED, build_pilot, fit_predictor
from codec.predictor.ranges import Ranges, measure_ranges

__all__ = ["CALIBRATED", "Predictor", "PredictorState", "Ranges", "Run", "build_pilot", "build_predictor", "fit_predictor",
           "measure_ranges"]  # fmt: skip
