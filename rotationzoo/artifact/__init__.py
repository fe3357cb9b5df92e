"""The artifact: a folder that holds rotations, their statistics, a manifest and a model card."""
