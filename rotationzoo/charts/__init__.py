"""Charts for pages and cards: what they show, as Vega-Lite, and how they are drawn offline."""
