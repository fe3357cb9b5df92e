"""Calibration text: documents from files and data sets, and the token rows they are cut into."""
