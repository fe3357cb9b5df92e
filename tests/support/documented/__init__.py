"""The commands and examples that the documentation shows, and the small world in which they run."""
