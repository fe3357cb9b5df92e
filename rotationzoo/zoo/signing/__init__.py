"""Signatures of artifacts and indexes, in the format of OpenSSF Model Signing."""
