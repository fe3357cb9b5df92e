"""The search of a recipe such as `best`: rotations chosen head by head, and clip ratios chosen for
the whole model, on calibration text that the statistics have not seen.

`run` is the search as a whole; `layer` chooses the rotations of one layer, `clip` the clip ratios.
"""
