"""What rotations cost a model: `metrics` computes every figure of an evaluation, `report` puts them
together window by window, and `cli.evaluate_view` prints them."""
