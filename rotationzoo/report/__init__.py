"""The report on an artifact: tables, charts, the model card, and a self-contained HTML page."""
