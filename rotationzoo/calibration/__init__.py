"""From a model's name to an artifact on disk: `job` is the whole job, `collect` its loop over
batches of text.

- Before the weights: `plan` (a job and what is known of it), `recipe_checks`, `memory`, `machine`,
  `output`.
- With the model: `model_run`, which calls `generate` (text that the model writes itself), `collect`
  (batches -> statistics, summed by `observers`), `fit` (statistics -> rotations) and `search`
  (better rotations, on held-out text).
- What is kept: `checkpoint` and `identity` of an unfinished job, `record` for the manifest, and
  `soundness`, through which every artifact is written.
"""
