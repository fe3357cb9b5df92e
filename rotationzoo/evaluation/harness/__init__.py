"""Tasks of lm-evaluation-harness, answered by a model that reads its cache in 2 bits.

Only this package imports `lm_eval`, and only inside functions that `evaluate --harness` calls: it
is an extra.
"""
