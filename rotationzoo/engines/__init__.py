"""Serving engines: export an artifact for an engine, and import rotation files made elsewhere."""
