"""Serving engines: exporting an artifact for one, and importing the rotation files of another."""
