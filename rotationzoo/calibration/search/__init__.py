"""The search for rotations and clip ratios that answer best, on held-out calibration text.

Recipes such as `best` use it. `run` is the whole search. Its inputs are a `task`, and it judges
each `candidate` by a `criterion`: what answers to `probes` lose (`answer_loss`), then how far
predictions diverge (`model_divergence`). `contest` says which candidates compete and which wins,
`layers` and `layer` choose rotations head by head, and `clip_ratios` chooses the clip ratios.
`record` describes all of it for the manifest.
"""
