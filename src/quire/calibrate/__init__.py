"""Calibration: computes the tables of the non-uniform codecs from a model and a text."""

from quire.calibrate.run import calibrate, import_calibration
from quire.calibrate.settings import CalibrationSettings

__all__ = ["CalibrationSettings", "calibrate", "import_calibration"]
