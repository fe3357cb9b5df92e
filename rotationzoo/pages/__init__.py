"""Self-contained HTML pages: one file each, with no request to anywhere."""
