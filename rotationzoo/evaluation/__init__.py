"""Evaluation: what each rotation costs a model whose KV cache is stored in 2 bits.

`metrics` computes every figure, `report` assembles the figures for each pair of windows, and the
package `report` shows them.
"""
