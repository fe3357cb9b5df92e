"""Calibration: from a model's name to an artifact on disk.

`job` runs the whole job, and `collect` is its main loop over batches of text.

- Before the weights are read: `plan` (a job and what is known about it), `recipe_checks`, `memory`,
  `machine` and `output`.
- With the model: `model_run`, which calls `generate` (text that the model writes itself), `collect`
  (batches -> statistics, summed by `observers`) and `fit` (statistics -> rotations).
- On disk: `checkpoint` and `identity` for an unfinished job, `record` for the manifest, and
  `soundness`, through which every artifact is written.
"""
