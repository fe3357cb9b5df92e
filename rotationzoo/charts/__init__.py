"""Charts as Vega-Lite specifications, drawn offline to SVG and PNG."""
