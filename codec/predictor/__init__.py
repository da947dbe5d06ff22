"""The predictor: a cheaper computation that guesses the target's cache from the tokens, in exact arithmetic."""

from codec.predictor.base import Predictor, Run, Shape
from codec.predictor.build import build_predictor
from codec.predictor.fit import CALIBRATED, build_pilot, fit_predictor
from codec.predictor.kept import Stored
from codec.predictor.memory import PredictorState
from codec.predictor.modelfree import MODEL_FREE, ModelFree, build_model_free
from codec.predictor.ranges import Ranges, measure_ranges

__all__ = ["CALIBRATED", "MODEL_FREE", "ModelFree", "Predictor", "PredictorState", "Ranges", "Run", "Shape", "Stored", "build_model_free",
           "build_pilot", "build_predictor", "fit_predictor", "measure_ranges"]  # fmt: skip
