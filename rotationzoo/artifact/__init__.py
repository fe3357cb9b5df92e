"""The artifact: a folder with rotations, their statistics, a manifest and a model card."""
