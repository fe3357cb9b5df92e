"""Calibration: from a model's name to an artifact on disk."""
