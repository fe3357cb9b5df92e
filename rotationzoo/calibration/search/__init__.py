"""The search for better rotations and clip ratios, on held-out calibration text.

Recipes such as `best` use it. Rotations are chosen for each head, and clip ratios for the whole
model, on calibration text that the statistics have not seen. `run` is the whole search, `layer`
chooses the rotations of one layer, and `clip_ratios` chooses the clip ratios.
"""
