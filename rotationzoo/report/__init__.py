"""The report on an artifact: tables, charts, the model card, and self-contained HTML pages with no
request to anywhere."""
