"""Calibration: from a model and a text to the tables that non-uniform codecs quantize with."""

from quire.calibrate.run import calibrate
from quire.calibrate.settings import CalibrationSettings

__all__ = ["CalibrationSettings", "calibrate"]
