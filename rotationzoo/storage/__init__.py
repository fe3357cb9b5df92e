"""Files, folders and JSON on disk: opened within limits, and written whole or not at all."""
